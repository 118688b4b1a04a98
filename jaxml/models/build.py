"""Binds a model spec to functions over plain parameter dicts, once, before anything is traced.

Reads `models.decoder`, `models.quantized`, `models.classifier`, `models.check`, `numerics.precision` and `trees`; `train`,
`infer` and `checkpoint` take the BoundModel. Outside a trace a model is its nested dict of arrays and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from jaxml import keys
from jaxml.errors import ConfigError, Faults
from jaxml.models.attention import choose
from jaxml.models.check import decoder_of, model_faults
from jaxml.models.classifier import Classifier
from jaxml.models.decoder import Decoder
from jaxml.models.quantized import QuantizedDecoder
from jaxml.models.spec import ClassifierSpec, DecoderSpec, ExecutionSpec
from jaxml.numerics.precision import Policy, cast_floating, dtypes
from jaxml.numerics.spec import PrecisionSpec
from jaxml.trees import unflatten


@dataclass(frozen=True, eq=False)
class BoundModel:
    """A model ready to be traced; `abstract_params` and `logical_axes` (tuples) have one structure."""

    spec: DecoderSpec | ClassifierSpec
    execution: ExecutionSpec
    policy: Policy
    backend: str
    graphdef: Any
    abstract_params: dict[str, Any]
    logical_axes: dict[str, Any]

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """New parameters as nested dicts, in the dtype of stored parameters.

        Call it under `jax.jit` with `out_shardings`: no device then holds a whole array, and the values do not change.
        Raises ConfigError for a quantized model, which is made of a trained one.
        """
        quantization = decoder_of(self.spec).quantization
        if quantization is not None:
            raise ConfigError(
                "model.quantization",
                expected="None in a model that is to be trained",
                got=quantization,
                todo="train without it, then `jaxml quantize` the checkpoint",
            )
        return nnx.to_pure_dict(nnx.state(self._build(key), nnx.Param))

    def bind(self, params: dict[str, Any]) -> Any:
        """The Decoder or Classifier with `params` cast to the compute dtype. Pure; call it inside a trace."""
        return nnx.merge(self.graphdef, cast_floating(params, self.policy.compute))

    def _build(self, key: Key[Array, ""]) -> Decoder | Classifier:
        build = Classifier if isinstance(self.spec, ClassifierSpec) else Decoder
        if isinstance(self.spec, DecoderSpec) and self.spec.quantization is not None:
            build = QuantizedDecoder
        return build(self.spec, self.execution, backend=self.backend, key=key, dtype=self.policy.params.name)  # type: ignore[arg-type]


def bind_model(
    spec: DecoderSpec | ClassifierSpec,
    precision: PrecisionSpec,
    execution: ExecutionSpec,
    backend: str | None = None,
) -> BoundModel:
    """Checks the spec and builds the abstract model. `backend` None is the one that JAX uses by default.

    Raises ConfigError with every fault of the spec, or for an attention form that cannot run on the backend.
    """
    faults = Faults(ConfigError)
    faults.found.extend(model_faults(spec))
    if isinstance(spec, ClassifierSpec) and spec.decoder.quantization is not None:
        todo = "leave it out: `jaxml quantize` takes language models"
        faults.add("model.decoder.quantization", expected="None", got=spec.decoder.quantization, todo=todo)
    faults.raise_if_any()
    backend = jax.default_backend() if backend is None else backend
    policy = dtypes(precision, backend)
    decoder = decoder_of(spec)
    for attention in (block.attention for block in decoder.blocks):
        choose(
            execution.attention,
            backend=backend,
            dtype=policy.compute.name,
            head_width=attention.head_width,
            has_softcap=attention.logit_softcap is not None,
            num_tokens=decoder.context_length,
        )
    unbuilt = BoundModel(spec, execution, policy, backend, None, {}, {})
    graphdef, state = nnx.split(nnx.eval_shape(lambda: unbuilt._build(keys.root_key(0))), nnx.Param)
    axes = {".".join(map(str, path)): leaf.get_metadata()["logical"] for path, leaf in nnx.to_flat_state(state)}
    return BoundModel(spec, execution, policy, backend, graphdef, nnx.to_pure_dict(state), unflatten(axes))
