"""Attention: one seam, `attend`, over the forms that a backend offers, and the module that holds the projections.

Reads the other pieces of `models`; `models.decoder` uses it. The XLA
form is the definition and runs everywhere. The cuDNN form (NVIDIA GPUs) and the Pallas form (TPUs, splash attention)
have not been run on their hardware by this project's tests, which have none: the choice, its refusals and, for Pallas,
the interpreted numbers are tested on the CPU.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jaxml.devices.sharding import BATCH_AXES, TOKEN_AXIS, axis_size, constrain_heads, has_batch_axes, split_heads
from jaxml.errors import ConfigError
from jaxml.keys import named_key
from jaxml.models.attention_blocks import Shape, attend_blocks
from jaxml.models.attention_split import attend_split, choose_form
from jaxml.models.cache import KeyValueCache, Start
from jaxml.models.named import named
from jaxml.models.norm import Norm
from jaxml.models.parameters import INIT_SCALE, Linear, Stack
from jaxml.models.rope import Rotation, rotate
from jaxml.models.spec import AttentionSpec, ExecutionSpec

Form = Literal["xla", "cudnn", "pallas"]
Choice = Literal["auto", "xla", "cudnn", "pallas"]
C = TypeVar("C", bound=KeyValueCache)
PALLAS_BLOCK = 128  # splash attention cuts the tokens into blocks of a multiple of this


class Visible(NamedTuple):
    """Which keys a query sees: of its segment, not later (causal), nearer than `window` tokens. A query of segment s sees
    the keys of segment s; padding (0) sees padding, so that no softmax is empty."""

    segment_ids_BT: Int[Array, "B T"]
    is_causal: bool
    window: int | None

    def mask_BTS(self) -> Bool[Array, "B T T"]:
        """The same as one array."""
        num_tokens = self.segment_ids_BT.shape[1]
        distance_TS = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
        mask_BTS = self.segment_ids_BT[:, :, None] == self.segment_ids_BT[:, None, :]
        if self.is_causal:
            mask_BTS &= distance_TS >= 0
        if self.window is not None:
            mask_BTS &= jnp.abs(distance_TS) < self.window
        return mask_BTS


def refusal(form: Form, *, backend: str, dtype: str, head_width: int, has_softcap: bool, num_tokens: int) -> str | None:
    """Why a form cannot compute this attention; None when it can."""
    if form == "cudnn":
        if backend != "gpu":
            return f"cuDNN needs an NVIDIA GPU, and the backend is {backend}"
        if dtype not in ("bfloat16", "float16"):
            return f"cuDNN's fused attention takes bfloat16 and float16, not {dtype}"
        if head_width % 8 or head_width > 128:
            return f"cuDNN's fused attention takes head widths that are multiples of 8 up to 128, not {head_width}"
        if has_softcap:
            return "cuDNN's fused attention has no logit soft-cap"
    if form == "pallas":
        if backend != "tpu":
            return f"the Pallas kernel is splash attention for TPUs, and the backend is {backend}"
        if dtype not in ("bfloat16", "float32"):
            return f"splash attention takes bfloat16 and float32, not {dtype}"
        if num_tokens % PALLAS_BLOCK:
            return f"splash attention takes sequence lengths that are multiples of {PALLAS_BLOCK}, not {num_tokens}"
    return None


def choose(choice: Choice, *, backend: str, dtype: str, head_width: int, has_softcap: bool, num_tokens: int) -> Form:
    """The form to run. `auto` is the backend's own kernel where that can, else XLA.

    Raises ConfigError when a form is asked for by name and cannot work.

    >>> choose("auto", backend="cpu", dtype="float32", head_width=64, has_softcap=False, num_tokens=256)
    'xla'
    """
    facts = {"dtype": dtype, "head_width": head_width, "has_softcap": has_softcap, "num_tokens": num_tokens}
    if choice == "auto":
        own: dict[str, Form] = {"gpu": "cudnn", "tpu": "pallas"}
        form = own.get(backend, "xla")
        return form if refusal(form, backend=backend, **facts) is None else "xla"
    reason = refusal(choice, backend=backend, **facts)
    if reason is not None:
        raise ConfigError(
            "execution.attention",
            expected="a form that can compute this attention here",
            got=f"{choice}: {reason}",
            todo="set --execution.attention auto",
        )
    return choice


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    seen: Visible,
    *,
    form: Form,
    logit_softcap: float | None = None,
    block: int | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H), over the visible keys) v, each group of N/K query heads sharing a key/value head.

    Vaswani et al. 2017 (arXiv:1706.03762); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); soft-cap
    cap * tanh(scores / cap): Gemma 2 (arXiv:2408.00118). Scores and softmax are in promote_types(dtype, float32).
    `block`: queries that the XLA form takes at a time (None: all).
    """
    match form:
        case "xla":
            shape = Shape(seen.is_causal, seen.window, logit_softcap, block or q_BTNH.shape[1])
            return attend_blocks(q_BTNH, k_BTKH, v_BTKH, seen.segment_ids_BT, shape)
        case "cudnn":
            mask_B1TS = seen.mask_BTS()[:, None]
            return jax.nn.dot_product_attention(
                q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TS, is_causal=seen.is_causal, implementation="cudnn"
            )
        case "pallas":
            return _attend_pallas(q_BTNH, k_BTKH, v_BTKH, seen, logit_softcap)


def query_block(num_tokens: int, backend: str) -> int:
    """Queries that the XLA form takes at a time: all, but on a CPU 64 (or a sixteenth of a long row), which skips the keys
    that a causal block cannot see and keeps its scores in the cache. Below 128 tokens the products would be too small."""
    return num_tokens if backend != "cpu" or num_tokens < 128 else max(64, -(-num_tokens // 16))


def softcap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap * tanh(x / cap): nearly x for small |x|, never beyond the cap."""
    return cap * jnp.tanh(x / cap)


def _attend_pallas(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, seen: Visible, logit_softcap: float | None, interpret: bool = False
) -> Array:
    # Imported here: Pallas for TPUs takes half a second to import, and only TPUs use it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, num_tokens, num_heads, head_width = q_BTNH.shape
    shape = (num_tokens, num_tokens)
    reach = None if seen.window is None else seen.window - 1
    if reach is not None:
        mask = splash_attention_mask.LocalMask(shape, (reach, 0 if seen.is_causal else reach), 0)
    else:
        mask = splash_attention_mask.CausalMask(shape) if seen.is_causal else splash_attention_mask.FullMask(shape)
    block = math.gcd(num_tokens, 4 * PALLAS_BLOCK)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=logit_softcap,
        interpret=interpret,
    )

    def rows(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, ids_BT: Array) -> Array:
        segments = splash_attention_kernel.SegmentIds(q=ids_BT, kv=ids_BT)
        return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH, segments)  # type: ignore[return-value]

    if has_batch_axes(jax.sharding.get_abstract_mesh().axis_names):
        # The compiler cannot split a kernel by itself: each device takes its own rows.
        split = PartitionSpec(BATCH_AXES)
        rows = jax.shard_map(rows, in_specs=(split,) * 4, out_specs=split, check_vma=False)
    q_BNTH, k_BKTH, v_BKTH = (x.swapaxes(1, 2) for x in (q_BTNH / math.sqrt(head_width), k_BTKH, v_BTKH))
    return rows(q_BNTH, k_BKTH, v_BKTH, seen.segment_ids_BT).swapaxes(1, 2)


class Attention(nnx.Module):
    """output(attend(query(x), key(x), value(x))) with QK-norm (Dehghani 2023, arXiv:2302.05442) before rotation."""

    def __init__(
        self, spec: AttentionSpec, width: int, *, residual_scale: float, stack: Stack, key: Key[Array, ""], dtype: str
    ):
        def linear(
            name: str, num_in: int, num_out: int, axes: tuple[str, str], has_bias: bool, scale: float = INIT_SCALE
        ) -> Linear:
            return Linear(
                num_in,
                num_out,
                axes,
                has_bias=has_bias,
                stack=stack,
                key=named_key(key, name),
                dtype=dtype,
                scale=scale,
            )

        q_width, kv_width = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
        self.spec = spec
        self.query = linear("query", width, q_width, ("embed", "heads"), spec.has_bias)
        self.key = linear("key", width, kv_width, ("embed", "kv_heads"), spec.has_bias)
        self.value = linear("value", width, kv_width, ("embed", "kv_heads"), spec.has_bias)
        self.output = linear(
            "output", q_width, width, ("heads", "embed"), spec.has_output_bias, INIT_SCALE * residual_scale
        )
        norms = [None, None]
        if spec.qk_norm is not None:
            norms = [Norm(spec.qk_norm, spec.head_width, None, stack=stack, dtype=dtype) for _ in norms]
        self.query_norm, self.key_norm = norms

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        seen: Visible,
        turn: Rotation | None,
        execution: ExecutionSpec,
        backend: str,
    ) -> Float[Array, "B T D"]:
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, turn)
        mixed_BTNH = named(self._mixed(q_BTNH, k_BTKH, v_BTKH, seen, execution, backend), "attention_mixed")
        return named(self.output(mixed_BTNH.reshape(*x_BTD.shape[:2], -1)), "attention_output")

    def _mixed(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, seen: Visible, execution: ExecutionSpec, backend: str
    ) -> Array:
        num_rows, num_tokens = q_BTNH.shape[:2]
        cap, size = self.spec.logit_softcap, axis_size(TOKEN_AXIS)
        if size > 1 and num_tokens % size == 0 and num_rows % math.prod(axis_size(axis) for axis in BATCH_AXES) == 0:
            shape = Shape(seen.is_causal, seen.window, cap, num_tokens)
            form = choose_form(execution.context, size)
            return attend_split(q_BTNH, k_BTKH, v_BTKH, seen.segment_ids_BT, shape, form)
        form = choose(
            execution.attention,
            backend=backend,
            dtype=q_BTNH.dtype.name,
            head_width=self.spec.head_width,
            has_softcap=cap is not None,
            num_tokens=num_tokens,
        )
        block = query_block(num_tokens, backend)
        return attend(q_BTNH, k_BTKH, v_BTKH, seen, form=form, logit_softcap=cap, block=block)

    def extend(
        self, x_BTD: Float[Array, "B T D"], turn: Rotation | None, cache: C, layer: int, start: Start
    ) -> tuple[Float[Array, "B T D"], C]:
        """The same for new tokens that follow those in the cache: (output, cache with them)."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, turn)
        spec = self.spec
        mixed_BTNH, cache = cache.extended(layer, q_BTNH, k_BTKH, v_BTKH, start, spec.window, spec.logit_softcap)
        output_BTD = self.output(named(mixed_BTNH, "attention_mixed").reshape(*x_BTD.shape[:2], -1))
        return named(output_BTD, "attention_output"), cache

    def project(
        self, x_BTD: Float[Array, "B T D"], turn: Rotation | None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values, normalised and turned to their positions."""
        spec = self.spec

        def heads(projection: Linear, norm: Norm | None, num_heads: int) -> Array:
            x_BTNH = projection(x_BTD).reshape(*x_BTD.shape[:2], num_heads, spec.head_width)
            return x_BTNH if norm is None else norm(x_BTNH)

        q_BTNH = heads(self.query, self.query_norm, spec.num_heads)
        k_BTKH = heads(self.key, self.key_norm, spec.num_kv_heads)
        v_BTKH = heads(self.value, None, spec.num_kv_heads)
        if turn is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, turn), rotate(k_BTKH, turn)
        axis = split_heads(spec.num_heads, spec.num_kv_heads)
        q_BTNH, k_BTKH, v_BTKH = (constrain_heads(x, axis) for x in (q_BTNH, k_BTKH, v_BTKH))
        return named(q_BTNH, "query"), named(k_BTKH, "key"), named(v_BTKH, "value")
