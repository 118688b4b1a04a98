"""The table of features: each row is an ordinary experiment, and `test_features` trains, checkpoints and resumes it.

`python -m tests.features.table` prints docs/features.md; a test holds the two together. A feature is here only if the run
of its row passes with packing, dropout, accumulation, mixing of two sources, checkpoint and resume all on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxml.data.spec import JsonlSource, ParquetSource, TableSource
from jaxml.inputs.spec import BpeTokenizerSpec, CharTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, LearnedPositionSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.recipes.experiment import Experiment
from jaxml.train.spec import Adafactor, Lion, Muon, ScheduleSpec

Change = Callable[[Experiment], Experiment]


@dataclass(frozen=True)
class Row:
    """Features that one experiment has together. `is_same_maths`: the losses must be those of the base experiment."""

    features: tuple[str, ...]
    change: Change
    is_same_maths: bool = False


def part(name: str, **fields: object) -> Change:
    return lambda e: replace(e, **{name: replace(getattr(e, name), **fields)})


def both(*changes: Change) -> Change:
    def change(experiment: Experiment) -> Experiment:
        for one in changes:
            experiment = one(experiment)
        return experiment

    return change


def blocks(*specs: BlockSpec) -> Change:
    return part("model", blocks=specs)


HEADS = AttentionSpec(num_heads=2, num_kv_heads=2, head_width=8, rope=RopeSpec())
ROWS = {
    "base": Row(
        (
            "grouped-query and multi-query attention, rotary positions, RMSNorm, SwiGLU, tied head",
            "best-fit packing with segments and positions; two sources mixed by weight; byte tokenizer",
            "dropout; gradient accumulation; clipping; AdamW; decay on matrices; cosine schedule with warm-up",
            "held-out split by document; retention of the newest checkpoints",
        ),
        lambda e: e,
    ),
    "gpt2": Row(
        (
            "learned positions, LayerNorm with bias, multi-head attention, exact GELU, biases, untied head with bias",
            "concatenate-and-split packing; constant schedule",
        ),
        both(
            blocks(
                BlockSpec(
                    replace(HEADS, rope=None, has_bias=True, has_output_bias=True),
                    MlpSpec(32, "gelu", has_bias=True),
                    NormSpec("layer", has_bias=True),
                )
            ),
            part("model", position=LearnedPositionSpec(), tied_head=False, head_bias=True),
            part("model", final_norm=NormSpec("layer", has_bias=True)),
            part("data", packing="concatenate"),
            part("optimizer", schedule=ScheduleSpec("constant")),
        ),
    ),
    "gemma": Row(
        (
            "alternating sliding-window and global layers, GeGLU, QK-norm, soft-caps on scores and logits",
            "Muon; warm-up-stable-decay schedule; z-loss",
        ),
        both(
            blocks(
                BlockSpec(replace(HEADS, window=4, qk_norm=NormSpec(), logit_softcap=20.0), MlpSpec(32, "geglu")),
                BlockSpec(replace(HEADS, qk_norm=NormSpec()), MlpSpec(32, "geglu")),
            ),
            part("model", logit_softcap=30.0),
            part("task", z_loss=1e-3),
            part("optimizer", rule=Muon(), schedule=ScheduleSpec("wsd", decay_steps=2)),
        ),
    ),
    "adafactor": Row(
        ("squared ReLU, tanh GELU", "Adafactor; linear schedule; no clipping", "character tokenizer"),
        both(
            blocks(BlockSpec(HEADS, MlpSpec(32, "squared_relu")), BlockSpec(HEADS, MlpSpec(32, "gelu_tanh"))),
            part("optimizer", rule=Adafactor(min_dim_to_factor=8), schedule=ScheduleSpec("linear"), clip_norm=0.0),
            part("data", tokenizer=CharTokenizerSpec()),
        ),
    ),
    "lion": Row(
        (
            "Lion; averaged weights (EMA) for evaluation and export",
            "BPE tokenizer trained at preparation; JSONL sources",
        ),
        both(
            part("optimizer", rule=Lion(), ema_decay=0.5),
            part("data", tokenizer=BpeTokenizerSpec(vocab_size=257)),
            lambda e: replace(
                e,
                data=replace(
                    e.data,
                    sources=tuple(
                        JsonlSource(str(s.path).replace(".txt", ".jsonl"), name=s.name, weight=s.weight)
                        for s in e.data.sources
                    ),
                ),
            ),
        ),
    ),
    "sources": Row(
        (
            "table (TSV) and Parquet sources in one mix; `tokenizer.json` of the tokenizers library",
            "retention of each n-th and of the best checkpoints; TensorBoard; spike guard",
        ),
        both(
            lambda e: replace(
                e,
                data=replace(
                    e.data,
                    tokenizer=HuggingFaceTokenizerSpec(str(e.data.sources[0].path).replace("a.txt", "tokenizer.json")),
                    sources=(
                        TableSource(str(e.data.sources[0].path).replace(".txt", ".tsv"), columns=("text",), name="a"),
                        ParquetSource(str(e.data.sources[1].path).replace(".txt", ".parquet"), name="b"),
                    ),
                ),
            ),
            part("checkpoint", keep_every=4, keep_best=1),
            part("guard", spike_threshold=50.0, on_nonfinite="skip"),
        ),
    ),
    "scanned": Row(
        ("scanned layers; full rematerialisation; cross entropy in chunks of the vocabulary projection",),
        part("execution", layers="scanned", rematerialize="full", logits_chunk_bytes=4096),
        is_same_maths=True,
    ),
    "sharded": Row(
        ("a `data` x `fsdp` mesh with sharded parameters, moments and initialisation",),
        part("mesh", data=1, fsdp=2),
        is_same_maths=True,
    ),
    "split": Row(
        (
            "a `context` x `tensor` mesh: ring attention, heads, hidden units and vocabulary split; rematerialisation by name",
        ),
        both(
            part("mesh", data=1, context=4, tensor=2),
            part("execution", rematerialize="names", saved_names=("query", "mlp_hidden")),
        ),
        is_same_maths=True,
    ),
    "bfloat16": Row(("bfloat16 products over float32 parameters",), part("precision", compute="bfloat16")),
    "float16": Row(
        ("float16 products with a dynamic loss scale, over a `data` x `fsdp` mesh",),
        both(part("precision", compute="float16"), part("mesh", data=1, fsdp=2)),
    ),
    "float8": Row(
        ("float8 products of the blocks (e4m3 forward, e5m2 backward)",), part("precision", compute="float8")
    ),
}

# verb -> what it can do, and the tests that show it on a checkpoint (file of tests/, function).
VERBS: dict[str, tuple[tuple[str, tuple[str, str]], ...]] = {
    "generate": (
        (
            "cached decoding equal to the full forward pass, float64 1e-10",
            ("models/test_cache.py", "test_pieces_through_a_cache_equal_one_pass"),
        ),
        (
            "ragged prompts decoded together as if alone",
            ("infer/test_runner.py", "test_requests_that_join_and_leave_are_answered_as_if_alone"),
        ),
        (
            "temperature, top-k, top-p, min-p",
            ("infer/test_sampling.py", "test_filters_keep_what_their_definition_keeps"),
        ),
        (
            "repetition, presence and frequency penalties",
            ("infer/test_sampling.py", "test_penalties_equal_their_definition"),
        ),
        ("seeds by (seed, position)", ("infer/test_sampling.py", "test_a_draw_depends_on_seed_and_position_alone")),
        (
            "stop strings and tokens, streamed or not",
            ("infer/test_runner.py", "test_stop_tokens_and_stop_strings_end_an_answer_and_are_not_in_it"),
        ),
        (
            "min and max tokens",
            ("infer/test_sampling.py", "test_a_stop_token_waits_for_min_tokens_and_then_ends_the_row"),
        ),
        ("log-probabilities", ("infer/test_runner.py", "test_log_probabilities_are_those_of_the_full_forward_pass")),
        (
            "beam search with a length penalty",
            ("infer/test_beam.py", "test_a_beam_that_holds_everything_finds_the_best_answers"),
        ),
    ),
    "prove": (
        (
            "each kind of planted fault is caught on its line",
            ("prove/test_faults.py", "test_a_planted_fault_fails_its_line_and_names_where_it_begins"),
        ),
        (
            "no alarm without a fault",
            ("prove/test_variants.py", "test_claims_about_steps_hold_without_a_fault"),
        ),
    ),
    "launch": (
        (
            "two processes, one killed, resumed to the losses of one process",
            ("launch/test_training.py", "test_the_resumed_run_goes_on_to_the_losses_of_one_process"),
        ),
        (
            "a signal to one stops all at the same step",
            ("launch/test_training.py", "test_a_signal_to_one_process_stops_all_at_the_same_step_after_saving"),
        ),
    ),
    "diverge": (
        (
            "the first step, value, layer and file in which two runs part",
            ("prove/test_diverge.py", "test_the_first_value_that_is_made_otherwise_is_named_with_its_layer_and_file"),
        ),
    ),
    "inspect": (
        (
            "XLA flags for overlapping compute and communication",
            ("devices/test_flags.py", "test_this_jaxlib_knows_every_flag_of_gpus_and_cpus"),
        ),
    ),
    "blame": (
        (
            "loss and gradient norm of each document of a step",
            ("prove/test_blame.py", "test_losses_of_the_documents_weighted_by_their_tokens_are_that_of_the_step"),
        ),
    ),
    "import": (
        (
            "Llama directories of Hugging Face",
            ("infer/test_runner.py", "test_a_trained_model_says_what_its_reference_says"),
        ),
    ),
}

NOT_DONE = (
    "Checkpoints in an object store: run directories are local, and a URL is refused.",
    "ArrayRecord sources and fsspec URLs are tested in `tests/data`, not in a whole run; ArrayRecord files must be local.",
    "Attention through cuDNN or the Pallas kernel: chosen and refused by rule, not run on their hardware.",
    "Several processes on a cluster: schedulers' environments are tested as they set them, not run on a cluster.",
    "float8 arithmetic on a GPU or TPU: XLA's CPU compiler widens the float8 operands inside the compiled product.",
    "Generation over a mesh: a model decodes on one device; chat templates of tools.",
    "Expert and pipeline parallelism.",
    "A researcher's own model or task from `file.py:function` (`--code`).",
)


def markdown() -> str:
    """docs/features.md."""
    lines = [
        "# Features",
        "",
        "Generated by `python -m tests.features.table`. Each row is one experiment that `tests/features` trains, stops,",
        "resumes and compares bit for bit, with packing, dropout, accumulation and a mix of two sources on.",
        "",
        "| experiment | features that it has together |",
        "|---|---|",
    ]
    lines += [f"| {name} | {'; '.join(row.features)} |" for name, row in ROWS.items()]
    lines += [
        "",
        "The model of every row then generates through its checkpoint, and its own full forward pass agrees.",
        "",
        "| verb | what it can do, with the test that shows it |",
        "|---|---|",
        *[
            f"| {verb} | {'; '.join(f'{what} (`{file}::{test}`)' for what, (file, test) in found)} |"
            for verb, found in VERBS.items()
        ],
        "",
        "Text classification is trained end to end by `experiments/spam.py`; guards (stop, skip, rewind), signals, kills and",
        "start modes are in `tests/recipes`.",
        "",
        "## Not done",
        "",
        *[f"- {line}" for line in NOT_DONE],
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
