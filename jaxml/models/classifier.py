"""Class logits from the pooled features of a decoder.

Reads `models.decoder`, `models.parameters` and `numerics.precision`; `models.build` binds it, `tasks.classification`
calls it.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxml.keys import named_key
from jaxml.models.decoder import Decoder, DropoutKeys
from jaxml.models.parameters import Linear, Stack
from jaxml.models.spec import ClassifierSpec, ExecutionSpec
from jaxml.numerics.precision import accumulate_dtype


def pool(features_BTD: Float[Array, "B T D"], segment_ids_BT: Int[Array, "B T"], pooling: str) -> Float[Array, "B D"]:
    """`mean` over the valid tokens (segment not 0), or the `last` valid one; zeros for a row without any.

    In promote_types(dtype of the features, float32).
    """
    wide_BTD = features_BTD.astype(accumulate_dtype(features_BTD.dtype))
    is_valid_BT = segment_ids_BT != 0
    if pooling == "last":
        indices_BT = jnp.where(is_valid_BT, jnp.arange(is_valid_BT.shape[1]), -1)
        chosen_BT = (indices_BT == indices_BT.max(1, keepdims=True)) & is_valid_BT
        return jnp.einsum("BTD,BT->BD", wide_BTD, chosen_BT.astype(wide_BTD.dtype))
    count_B1 = jnp.maximum(is_valid_BT.sum(1, keepdims=True), 1)
    return jnp.einsum("BTD,BT->BD", wide_BTD, is_valid_BT.astype(wide_BTD.dtype)) / count_B1.astype(wide_BTD.dtype)


class Classifier(nnx.Module):
    """A decoder without a vocabulary projection, and a linear head with a bias over its pooled features."""

    def __init__(
        self, spec: ClassifierSpec, execution: ExecutionSpec, *, backend: str, key: Key[Array, ""], dtype: str
    ):
        self.spec = spec
        self.decoder = Decoder(
            spec.decoder, execution, backend=backend, key=named_key(key, "decoder"), dtype=dtype, has_head=False
        )
        self.head = Linear(
            spec.decoder.width,
            spec.num_classes,
            ("embed", "classes"),
            has_bias=True,
            stack=Stack(),
            key=named_key(key, "head"),
            dtype=dtype,
        )

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        dropout_keys_B: DropoutKeys = None,
    ) -> tuple[Float[Array, "B C"], dict[str, Array]]:
        """(class logits in promote_types(compute, float32), auxiliary arrays of the decoder)."""
        features_BTD, aux = self.decoder(tokens_BT, positions_BT, segment_ids_BT, dropout_keys_B)
        return self.head(pool(features_BTD, segment_ids_BT, self.spec.pooling)), aux
