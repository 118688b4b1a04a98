"""The decoder with its matrices in int8: linear maps, token embeddings and head; everything else is as it was.

Reads `models.decoder`, `models.parameters` and `numerics.quantized`; `models.build` makes it for a spec that says
`quantization`, `compress.weights` fills it. A matrix has two leaves, `values` int8 (out, in) and `scales` (out), in place of
`kernel` or `table`; a tied head and the embedding share theirs. It is for inference: nothing here has a gradient.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxml.models.attention import softcap
from jaxml.models.decoder import Decoder, Head, Table
from jaxml.models.named import named
from jaxml.models.parameters import Linear
from jaxml.models.spec import DecoderSpec, ExecutionSpec, Quantization
from jaxml.numerics.quantized import dequantize, int8_product, weight_only_product


class QuantizedMatrix(nnx.Module):
    """W, from the parameter `matrix` that it takes the place of, whose dimensions are (in, out), or (out, in) when
    `is_transposed`; zeros until a checkpoint's values are bound to it."""

    def __init__(self, matrix: nnx.Param, scheme: Quantization, is_transposed: bool = False):
        shape, axes = matrix[...].shape, matrix.get_metadata()["logical"]
        order = (-2, -1) if is_transposed else (-1, -2)
        self.scheme = scheme
        stack, stack_axes = shape[:-2], axes[:-2]
        self.values = nnx.Param(
            jnp.zeros((*stack, *(shape[dim] for dim in order)), jnp.int8),
            logical=(*stack_axes, *(axes[dim] for dim in order)),
        )
        self.scales = nnx.Param(jnp.ones((*stack, shape[order[0]]), jnp.float32), logical=(*stack_axes, axes[order[0]]))

    def product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """x W^T in promote_types(the dtype of x, float32)."""
        multiply = int8_product if self.scheme == "int8" else weight_only_product
        return multiply(x, self.values[...], self.scales[...])


class QuantizedLinear(QuantizedMatrix, Linear):
    """y = x W (+ b), in the dtype of x."""

    def __init__(self, linear: Linear, scheme: Quantization):
        super().__init__(linear.kernel, scheme)
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = self.product(x).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]


class QuantizedTable(QuantizedMatrix, Table):
    """Rows to look up by number, in the compute dtype, which is that of the scales."""

    def __init__(self, table: Table, scheme: Quantization):
        super().__init__(table.table, scheme, is_transposed=True)

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        values, scales = (jnp.take(leaf[...], ids_BT, axis=0, mode="clip") for leaf in (self.values, self.scales))
        return dequantize(values, scales)


class QuantizedHead(QuantizedMatrix, Head):
    """A head with a matrix of its own."""

    def __init__(self, kernel: nnx.Param, bias: nnx.Param | None, scheme: Quantization):
        super().__init__(kernel, scheme)
        self.bias = bias


class QuantizedDecoder(Decoder):
    """The decoder of a spec with `quantization`."""

    def __init__(self, spec: DecoderSpec, execution: ExecutionSpec, *, backend: str, key: Key[Array, ""], dtype: str):
        super().__init__(spec, execution, backend=backend, key=key, dtype=dtype)
        scheme = spec.quantization
        assert scheme is not None
        self.embed = QuantizedTable(self.embed, scheme)
        if self.head is not None and self.head.kernel is not None:
            self.head = QuantizedHead(self.head.kernel, self.head.bias, scheme)
        for block in self.blocks.values():
            for piece in (block.attention, block.mlp):
                for name, child in list(vars(piece).items()):
                    if isinstance(child, Linear):
                        setattr(piece, name, QuantizedLinear(child, scheme))

    def logits(self, features: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """See `Decoder.logits`."""
        owner = self.head if isinstance(self.head, QuantizedHead) else self.embed
        assert isinstance(owner, QuantizedMatrix)
        logits = owner.product(features)
        if self.head is not None and self.head.bias is not None:
            logits = logits + self.head.bias[...].astype(logits.dtype)
        return named(logits if self.spec.logit_softcap is None else softcap(logits, self.spec.logit_softcap), "logits")
