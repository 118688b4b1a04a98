"""The decoder: token embeddings, a stack of pre-norm blocks, a final norm, and the head as a separate call.

Reads the pieces of `models`, `devices.sharding` and `errors`; `models.build` binds it, `tasks` call it. Parameters are
stacked per repeating group: leaf (L/p, ...) under `blocks.<i>` for the i-th of p blocks in the pattern (format B of the
architecture). Scanned execution is `lax.scan` over the stacks, unrolled execution takes static slices of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxml.devices.sharding import constrain_batch
from jaxml.errors import ConfigError
from jaxml.keys import named_key
from jaxml.models.attention import Attention, Visible, softcap
from jaxml.models.cache import KeyValueCache, Start, positions_of
from jaxml.models.dropout import drop
from jaxml.models.mlp import Mlp
from jaxml.models.named import named, policy_of
from jaxml.models.norm import Norm
from jaxml.models.parameters import INIT_SCALE, Stack, constant, dense_out_in, normal
from jaxml.models.rope import Rotation, rotation
from jaxml.models.spec import BlockSpec, DecoderSpec, ExecutionSpec, RopeSpec
from jaxml.numerics.precision import accumulate_dtype

DropoutKeys = Key[Array, " B"] | None
Views = dict[int | None, Visible]  # by window
C = TypeVar("C", bound=KeyValueCache)
Turns = dict[tuple[RopeSpec | None, int], Rotation]  # by (RopeSpec, head width)


class Block(nnx.Module):
    """One pre-norm residual block, or a stack of them until it is sliced."""

    def __init__(
        self, spec: BlockSpec, width: int, *, residual_scale: float, stack: Stack, key: Key[Array, ""], dtype: str
    ):
        pieces = {"residual_scale": residual_scale, "stack": stack, "dtype": dtype}
        self.spec = spec
        self.attention_norm = Norm(spec.norm, width, "embed", stack=stack, dtype=dtype)
        self.attention = Attention(spec.attention, width, key=named_key(key, "attention"), **pieces)
        self.mlp_norm = Norm(spec.norm, width, "embed", stack=stack, dtype=dtype)
        self.mlp = Mlp(spec.mlp, width, key=named_key(key, "mlp"), **pieces)


class Table(nnx.Module):
    """Rows to look up by number: token or position embeddings."""

    def __init__(self, num_rows: int, width: int, axes: tuple[str, str], key: Key[Array, ""], dtype: str):
        self.table = normal(named_key(key, "table"), (num_rows, width), axes, INIT_SCALE, dtype)

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.table[...], ids_BT, axis=0, mode="clip")


class Head(nnx.Module):
    """The vocabulary projection's own leaves: a kernel unless it is tied, a bias if there is one."""

    def __init__(self, spec: DecoderSpec, key: Key[Array, ""], dtype: str):
        shape, axes = (spec.width, spec.vocab_size), ("embed", "vocab")
        self.kernel = None if spec.tied_head else normal(named_key(key, "kernel"), shape, axes, INIT_SCALE, dtype)
        self.bias = constant(0.0, shape[1:], axes[1:], dtype) if spec.head_bias else None


class Decoder(nnx.Module):
    """Tokens to features, and features to logits; `has_head` False leaves the vocabulary projection out."""

    def __init__(
        self,
        spec: DecoderSpec,
        execution: ExecutionSpec,
        *,
        backend: str,
        key: Key[Array, ""],
        dtype: str,
        has_head: bool = True,
    ):
        self.spec, self.execution, self.backend = spec, execution, backend
        self.is_out_in = False  # `unrolled.for_decoding` sets it, for a head whose matrix is (out, in)
        self.embed = Table(spec.vocab_size, spec.width, ("vocab", "embed"), named_key(key, "embed"), dtype)
        position_axes, position_key = ("position", "embed"), named_key(key, "positions")
        has_table = spec.position is not None
        self.positions = (
            Table(spec.context_length, spec.width, position_axes, position_key, dtype) if has_table else None
        )
        stack = Stack(spec.num_layers // len(spec.blocks))
        residual_scale = (2 * spec.num_layers) ** -0.5  # GPT-2: two additions to the residual stream a layer
        self.blocks = nnx.Dict(
            {
                str(i): Block(
                    block,
                    spec.width,
                    residual_scale=residual_scale,
                    stack=stack,
                    key=named_key(key, f"blocks.{i}"),
                    dtype=dtype,
                )
                for i, block in enumerate(spec.blocks)
            }
        )
        self.final_norm = Norm(spec.final_norm, spec.width, "embed", stack=Stack(), dtype=dtype)
        has_own = has_head and (spec.head_bias or not spec.tied_head)
        self.head = Head(spec, named_key(key, "head"), dtype) if has_own else None

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        dropout_keys_B: DropoutKeys = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """(features in the compute dtype, auxiliary arrays). Segment 0 is padding: its features are exactly zero.

        `positions_BT` count from 0 within each segment. Dropout is on exactly when keys are given and the spec has a
        rate. Raises ConfigError when T is beyond the context length.
        """
        spec = self.spec
        if tokens_BT.shape[1] > spec.context_length:
            raise ConfigError(
                "tokens of a row",
                expected=f"at most the model's context_length, {spec.context_length}",
                got=str(tokens_BT.shape[1]),
                todo="shorten data.sequence_length, or raise model.context_length and train again",
            )
        x_BTD, turns = self._embed(tokens_BT, positions_BT)
        x_BTD = named(constrain_batch(drop(x_BTD, dropout_keys_B, spec.dropout, "embedding")), "embedded")
        windows = {block.attention.window for block in spec.blocks}
        views = {window: Visible(segment_ids_BT, spec.is_causal, window) for window in windows}
        x_BTD = self._run_layers(x_BTD, views, turns, dropout_keys_B)
        x_BTD = named(self.final_norm(x_BTD), "final_norm")
        return jnp.where(segment_ids_BT[:, :, None] != 0, x_BTD, jnp.zeros((), x_BTD.dtype)), {}

    def extend(self, tokens_BT: Int[Array, "B T"], start: Start, cache: C) -> tuple[Float[Array, "B T D"], C]:
        """(features, cache with these tokens) of tokens that follow those in the cache, whose own attention is the same
        as in one pass over the whole row. Causal models only; no dropout.

        `start`: the position of the first new token, one for all rows or one a row; start + T must not exceed the
        capacity. Tokens past the end of a shorter row may be anything: the caller drops their features, and the next
        call, which starts at the end of the row, writes over their keys before a query sees them.
        """
        spec = self.spec
        positions_BT = positions_of(start, *tokens_BT.shape)
        x_BTD, turns = self._embed(tokens_BT, positions_BT)
        x_BTD = named(x_BTD, "embedded")
        splits = [nnx.split(self.blocks[str(i)]) for i in range(len(spec.blocks))]
        for layer in range(spec.num_layers):
            row, index = divmod(layer, len(splits))
            graphdef, state = splits[index]
            block = nnx.merge(graphdef, jax.tree.map(lambda leaf, row=row: leaf[row], state))
            attention = block.spec.attention
            turn = turns.get((attention.rope, attention.head_width))
            branch, cache = block.attention.extend(block.attention_norm(x_BTD), turn, cache, layer, start)
            x_BTD = x_BTD + branch
            x_BTD = x_BTD + block.mlp(block.mlp_norm(x_BTD))
        return named(self.final_norm(x_BTD), "final_norm"), cache

    def _embed(self, tokens_BT: Array, positions_BT: Array) -> tuple[Array, Turns]:
        """Token embeddings, with learned positions if there are any, and the rotations that the layers need."""
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        wide = accumulate_dtype(x_BTD.dtype)
        kinds = {(block.attention.rope, block.attention.head_width) for block in self.spec.blocks}
        turned = {(rope, width): rotation(positions_BT, width, rope, wide) for rope, width in kinds if rope is not None}
        turns: Turns = {**turned}
        return x_BTD, turns

    def _run_layers(self, x_BTD: Array, views: Views, turns: Turns, dropout_keys_B: DropoutKeys) -> Array:
        splits = [nnx.split(self.blocks[str(i)]) for i in range(len(self.spec.blocks))]
        period, is_scanned = len(splits), self.execution.layers == "scanned"

        def runner(index: int) -> Callable[[Any, Array, int | Array], Array]:
            def run(state: Any, x_BTD: Array, layer: int | Array) -> Array:
                block = nnx.merge(splits[index][0], state)
                return self._run_block(block, x_BTD, layer, views, turns, dropout_keys_B)

            kind = self.execution.rematerialize
            if kind == "none":
                return run
            return jax.checkpoint(run, policy=policy_of(kind, self.execution.saved_names), prevent_cse=not is_scanned)

        runs = [runner(i) for i in range(period)]
        num_rounds = self.spec.num_layers // period
        if not is_scanned:
            for layer in range(self.spec.num_layers):
                state = jax.tree.map(lambda leaf, row=layer // period: leaf[row], splits[layer % period][1])
                x_BTD = runs[layer % period](state, x_BTD, layer)
            return x_BTD

        def one_round(x_BTD: Array, scanned: tuple[list[Any], Array]) -> tuple[Array, None]:
            states, number = scanned
            for index, (run, state) in enumerate(zip(runs, states, strict=True)):
                x_BTD = run(state, x_BTD, number * period + index)
            return x_BTD, None

        return jax.lax.scan(one_round, x_BTD, ([state for _, state in splits], jnp.arange(num_rounds)))[0]

    def _run_block(
        self, block: Block, x_BTD: Array, layer: int | Array, views: Views, turns: Turns, dropout_keys_B: DropoutKeys
    ) -> Array:
        attention, rate = block.spec.attention, self.spec.dropout
        turn = turns.get((attention.rope, attention.head_width))
        view = views[attention.window]
        branch = block.attention(block.attention_norm(x_BTD), view, turn, self.execution, self.backend)
        x_BTD = x_BTD + drop(branch, dropout_keys_B, rate, "attention", layer)
        branch = block.mlp(block.mlp_norm(x_BTD))
        return constrain_batch(x_BTD + drop(branch, dropout_keys_B, rate, "mlp", layer))

    def logits(self, features: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Next-token logits in promote_types(compute, float32), soft-capped if the spec says so; any leading shape."""
        wide = accumulate_dtype(features.dtype)
        kernel = None if self.head is None or self.head.kernel is None else self.head.kernel[...]
        table, inner = (self.embed.table[...], 1) if kernel is None else (kernel, 0)
        if self.is_out_in:
            logits = dense_out_in(features, table, wide)
        else:
            over = (((features.ndim - 1,), (inner,)), ((), ()))
            logits = jax.lax.dot_general(features, table, over, preferred_element_type=wide)
        if self.head is not None and self.head.bias is not None:
            logits = logits + self.head.bias[...].astype(wide)
        return named(logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap), "logits")
