"""What must hold across the fields of a model spec. No jax.

Reads `models.spec` and `errors`; `models.build` raises these, and `recipes` collects them with the faults of other
stages.
"""

from __future__ import annotations

from jaxml.errors import ConfigError, Fault, Faults
from jaxml.models.spec import AttentionSpec, ClassifierSpec, DecoderSpec


def decoder_of(spec: DecoderSpec | ClassifierSpec) -> DecoderSpec:
    """The decoder inside a model."""
    return spec.decoder if isinstance(spec, ClassifierSpec) else spec


def model_faults(spec: DecoderSpec | ClassifierSpec, path: str = "model") -> list[Fault]:
    """Every fault of a model spec; `path` is what its fields are called in messages."""
    faults = Faults(ConfigError)
    if isinstance(spec, ClassifierSpec):
        if spec.num_classes < 2:
            faults.add(
                f"{path}.num_classes", expected="at least 2", got=str(spec.num_classes), todo="count the label names"
            )
        return faults.found + model_faults(spec.decoder, f"{path}.decoder")
    for name in ("vocab_size", "context_length", "width", "num_layers"):
        if getattr(spec, name) < 1:
            faults.add(
                f"{path}.{name}", expected="at least 1", got=str(getattr(spec, name)), todo="set a positive size"
            )
    if not spec.blocks or spec.num_layers % len(spec.blocks):
        faults.add(
            f"{path}.num_layers",
            expected="a multiple of the number of blocks in the repeating pattern, which is at least 1",
            got=f"{spec.num_layers} layers, {len(spec.blocks)} blocks",
            todo="change num_layers, or write the pattern out in full",
        )
    if not 0.0 <= spec.dropout < 1.0:
        faults.add(
            f"{path}.dropout", expected="from 0 up to but not 1", got=str(spec.dropout), todo="0 switches it off"
        )
    _check_softcap(spec.logit_softcap, f"{path}.logit_softcap", faults)
    for index, block in enumerate(spec.blocks):
        where = f"{path}.blocks.{index}"
        if block.mlp.width < 1:
            faults.add(f"{where}.mlp.width", expected="at least 1", got=str(block.mlp.width), todo="4 x width is usual")
        _check_attention(block.attention, f"{where}.attention", faults)
    return faults.found


def _check_attention(spec: AttentionSpec, path: str, faults: Faults) -> None:
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_width": spec.head_width}
    small = {name: size for name, size in sizes.items() if size < 1}
    for name, size in small.items():
        faults.add(f"{path}.{name}", expected="at least 1", got=str(size), todo="set a positive size")
    if not small and spec.num_heads % spec.num_kv_heads:
        faults.add(
            f"{path}.num_kv_heads",
            expected=f"a divisor of num_heads, {spec.num_heads}",
            got=str(spec.num_kv_heads),
            todo="num_kv_heads = num_heads is ordinary multi-head attention",
        )
    if spec.rope is not None and spec.head_width % 2:
        faults.add(
            f"{path}.head_width", expected="even, for rotary positions", got=str(spec.head_width), todo="add one"
        )
    if spec.window is not None and spec.window < 1:
        faults.add(f"{path}.window", expected="at least 1, or None", got=str(spec.window), todo="None sees everything")
    _check_softcap(spec.logit_softcap, f"{path}.logit_softcap", faults)


def _check_softcap(cap: float | None, path: str, faults: Faults) -> None:
    if cap is not None and not cap > 0:
        faults.add(path, expected="a positive cap, or None", got=str(cap), todo="None switches it off")


def heads_computed_whole(spec: DecoderSpec, tensor: int) -> list[str]:
    """Notes on the blocks whose heads every device computes, because `tensor` devices do not divide them."""
    notes = []
    for index, block in enumerate(spec.blocks):
        heads, kv_heads = block.attention.num_heads, block.attention.num_kv_heads
        if heads % tensor or kv_heads % tensor:
            counts = f"num_heads={heads} and num_kv_heads={kv_heads}"
            notes.append(f"blocks.{index}.attention: replicated, tensor={tensor} does not divide both {counts}")
    return notes
