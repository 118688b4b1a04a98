"""The small copy of an experiment that is proven: the same pieces, fewer and narrower, in float64. The rule, as text.

Reads the spec files, `prove.meshes`, `prove.slices` and `recipes.preparing`; `prove.subject` opens what it makes. The copy
keeps what makes an experiment go wrong: every kind of block in the pattern, the ratio of heads, masks that cut, packing,
mixing, accumulation, dropout, the optimizer and its schedule, and whether an axis of the mesh divides a dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.config.spec import diff
from jaxml.data.prepare import prepare
from jaxml.data.prepared import Prepared
from jaxml.data.spec import DataSpec
from jaxml.devices.spec import MeshSpec
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec, TokenizerSpec
from jaxml.models.check import decoder_of
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, DecoderSpec, ExecutionSpec, ModelSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.meshes import own_mesh
from jaxml.prove.slices import NUM_DOCUMENTS, sliced_sources
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.preparing import labels_of
from jaxml.train.spec import GuardSpec, OptimizerSpec, TrainSpec

STEPS, SAVE_EVERY, ROWS = 16, 4, 24
TOKENS, HEAD_WIDTH, WIDTH, MLP_WIDTH, BPE_VOCABULARY = 32, 8, 16, 24, 320
MOST_HEADS, MOST_BLOCKS, MOST_ACCUMULATE, LEAST_HELD_OUT, LEAST_DROPOUT = 8, 4, 4, 0.2, 0.1
KEPT_VOCABULARY = 1024  # ids of somebody else's tokenizer, up to which it is kept

RULE = (
    f"model: every kind of block in the pattern, {MOST_BLOCKS} at most, and two rounds of it where the model has two",
    f"heads: as many query heads for each key head ({MOST_HEADS} at most), fewer of both, {HEAD_WIDTH} wide at most",
    f"widths: {WIDTH} and {MLP_WIDTH} (MLP), plus what is left of your own by 8, so that what an axis divides stays so",
    f"tokens: {TOKENS} a row at most, with the same rest by 8; a window that cut your rows cuts these in the same place",
    f"data: the first {NUM_DOCUMENTS} documents of each source, in short pieces; your tokenizer on them (a BPE vocabulary "
    f"of {BPE_VOCABULARY} at most, and such a one for a published vocabulary of over {KEPT_VOCABULARY}); at least "
    f"{LEAST_HELD_OUT:.0%} held out",
    f"training: {ROWS} rows a step (more for accumulation), {STEPS} steps, the schedule in proportion, a checkpoint every "
    f"{SAVE_EVERY}; your optimizer, clipping, averaging, z-loss, mixing and packing as they are",
    f"dropout: yours, or {LEAST_DROPOUT} where you have none, so that its keys are proven too",
    "precision: float64 in the place of yours; quantisers are the identity",
    "mesh: yours, made to fit 8 devices; an accelerator's own attention kernel becomes 'auto'",
)


@dataclass(frozen=True, eq=False)
class Small:
    """The small experiment, its prepared data, and each field that is not as it was, as text."""

    experiment: Experiment
    prepared: Prepared
    changes: tuple[str, ...]


def shrink(experiment: Experiment, folder: Path) -> Small:
    """The small copy of a checked experiment, with its sources and prepared data in `folder`.

    Raises DataError where the sources cannot be read or used.
    """
    data = _data(experiment.data, decoder_of(experiment.model), folder)
    prepared = prepare(data, has_labels=labels_of(experiment))
    model = _model(experiment.model, experiment.data.sequence_length, data.sequence_length, prepared.vocab_size)
    train = _train(experiment.train)
    execution = _execution(experiment, train, data.sequence_length, prepared.vocab_size)
    small = replace(
        experiment,
        model=model,
        data=data,
        train=train,
        optimizer=_optimizer(experiment.optimizer, experiment.train.steps),
        mesh=_mesh(experiment.mesh, data.sequence_length),
        precision=PrecisionSpec("float64", "float64"),
        execution=execution,
        checkpoint=CheckpointSpec(every=SAVE_EVERY, keep_last=STEPS),
        guard=GuardSpec(),
    )
    changes = tuple(
        f"{difference.path}: {difference.expected} -> {difference.got}"
        for difference in diff(experiment, small)
        if not difference.path.endswith((".path", ".prepared")) and not difference.path.startswith("data.sources")
    )
    return Small(small, prepared, changes)


def _mesh(spec: MeshSpec, small_tokens: int) -> MeshSpec:
    """The own mesh on eight devices; of its token axis as many as split the rows of the copy evenly."""
    mesh = own_mesh(spec)
    return replace(mesh, context=math.gcd(mesh.context, small_tokens))


def _data(data: DataSpec, decoder: DecoderSpec, folder: Path) -> DataSpec:
    return replace(
        data,
        sources=sliced_sources(data.sources, folder / "sources"),
        prepared=str(folder / "prepared"),
        sequence_length=_tokens(data.sequence_length),
        tokenizer=_tokenizer(data.tokenizer, decoder.vocab_size),
        held_out=max(data.held_out, LEAST_HELD_OUT),
        too_long="truncate",
    )


def _tokens(own: int) -> int:
    """At most TOKENS, and what is left of it by 8 as it was."""
    if own <= TOKENS:
        return own
    return TOKENS - (8 - own % 8) % 8


def _tokenizer(spec: TokenizerSpec, vocab_size: int) -> TokenizerSpec:
    if isinstance(spec, BpeTokenizerSpec):
        return BpeTokenizerSpec(min(spec.vocab_size, BPE_VOCABULARY))
    if isinstance(spec, HuggingFaceTokenizerSpec) and vocab_size > KEPT_VOCABULARY:
        return BpeTokenizerSpec(BPE_VOCABULARY)
    return spec


def _model(model: ModelSpec, tokens: int, small_tokens: int, vocab_size: int) -> ModelSpec:
    if isinstance(model, ClassifierSpec):
        return replace(model, decoder=_decoder(model.decoder, tokens, small_tokens, vocab_size))
    return _decoder(model, tokens, small_tokens, vocab_size)


def _decoder(spec: DecoderSpec, tokens: int, small_tokens: int, vocab_size: int) -> DecoderSpec:
    blocks = spec.blocks if len(spec.blocks) <= MOST_BLOCKS else tuple(dict.fromkeys(spec.blocks))[:MOST_BLOCKS]
    rounds = min(2, spec.num_layers // len(spec.blocks)) if len(spec.blocks) <= MOST_BLOCKS else 1
    vocab_size += (spec.vocab_size - vocab_size) % 8  # what an axis divides stays so
    return replace(
        spec,
        vocab_size=vocab_size,
        context_length=small_tokens,
        width=WIDTH + spec.width % 8 if spec.width > WIDTH else spec.width,
        num_layers=rounds * len(blocks),
        blocks=tuple(_block(block, tokens, small_tokens) for block in blocks),
        dropout=spec.dropout or LEAST_DROPOUT,
    )


def _block(block: BlockSpec, tokens: int, small_tokens: int) -> BlockSpec:
    mlp = block.mlp
    if mlp.width > MLP_WIDTH:
        mlp = replace(mlp, width=MLP_WIDTH + mlp.width % 8)
    return replace(block, attention=_attention(block.attention, tokens, small_tokens), mlp=mlp)


def _attention(spec: AttentionSpec, tokens: int, small_tokens: int) -> AttentionSpec:
    group = spec.num_heads // spec.num_kv_heads
    small_group = group if group <= MOST_HEADS else MOST_HEADS - (group - MOST_HEADS) % 2
    most = max(2, 4 // small_group)
    kv_heads = spec.num_kv_heads if spec.num_kv_heads <= most else most - spec.num_kv_heads % 2
    window = spec.window
    if window is not None and small_tokens < tokens:
        window = max(2, round(window * small_tokens / tokens))
        window = min(window, small_tokens - 1) if spec.window < tokens else window  # type: ignore[operator]
    return replace(
        spec,
        num_heads=small_group * kv_heads,
        num_kv_heads=kv_heads,
        head_width=min(spec.head_width, HEAD_WIDTH),
        window=window,
    )


def _train(spec: TrainSpec) -> TrainSpec:
    accumulate = min(spec.accumulate, MOST_ACCUMULATE)
    # Rows that every mesh of eight devices and `accumulate` microbatches split evenly.
    rows = next(rows for rows in range(ROWS, 8 * ROWS, ROWS) if rows % (8 * accumulate) == 0)
    eval_every = SAVE_EVERY if spec.eval_every else 0
    return replace(
        spec,
        steps=STEPS,
        batch_size=rows,
        accumulate=accumulate,
        eval_every=eval_every,
        eval_batches=0,
        eval_batch_size=0,
    )


def _optimizer(spec: OptimizerSpec, steps: int) -> OptimizerSpec:
    def scaled(count: int) -> int:
        return 0 if count == 0 else max(1, count * STEPS // steps)

    schedule = spec.schedule
    warmup, decay, total = (scaled(n) for n in (schedule.warmup_steps, schedule.decay_steps, schedule.total_steps))
    total = max(total, warmup + decay) if total else 0
    return replace(spec, schedule=replace(schedule, warmup_steps=warmup, decay_steps=decay, total_steps=total))


def _execution(experiment: Experiment, small: TrainSpec, small_tokens: int, small_vocabulary: int) -> ExecutionSpec:
    """The same choices; the loss is taken in chunks (three at most) where it was, and no kernel of an accelerator."""
    spec, train, vocab_size = experiment.execution, experiment.train, decoder_of(experiment.model).vocab_size
    elements = train.batch_size // train.accumulate * experiment.data.sequence_length * vocab_size
    small_elements = small.batch_size // small.accumulate * small_tokens * small_vocabulary
    chunks = -(-elements * 4 // spec.logits_chunk_bytes)
    if chunks > 1:
        spec = replace(spec, logits_chunk_bytes=max(1, small_elements * 8 // min(chunks, 3)))
    return spec if spec.attention in ("auto", "xla") else replace(spec, attention="auto")
