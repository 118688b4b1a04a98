"""What lies beside the arrays of a checkpoint and seals it: specs, versions, fingerprints, metrics, lineage, probe.

Reads `config.spec` and `errors`; recipes make it, `checkpoint.store` writes and reads it, `inspect` prints it. Plain
JSON and no jax, so that a checkpoint can be understood without opening an array.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxml.config.spec import canonical_json
from jaxml.errors import CheckpointError, Fault

FORMAT = 1

# How a manifest of an older format becomes one of the next: {1: upgrade_1_to_2}. The seal is checked before, on the
# manifest as it was written. A small checkpoint of every format number lies in tests/checkpoint and must open.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

Leaves = Mapping[str, Mapping[str, list[Any]]]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its arrays.

    experiment: tagged JSON of the experiment (`config.spec.to_json`).
    versions: package name to version. labels: class names in order (classification), else empty.
    skipped_steps: data steps that a rewind left out; with `seed`, `step` and `batch_size` they are the data position.
    metrics: what was measured at this step; may hold NaN and infinities. lineage: one JSON object a process start.
    leaves: part, then dotted leaf path, to [shape, dtype name]. probe: see `checkpoint.probe.record`.
    """

    step: int
    experiment: dict[str, Any]
    versions: dict[str, str]
    seed: int
    batch_size: int
    tokenizer_fingerprint: str
    data_fingerprint: str
    leaves: Leaves
    probe: dict[str, Any]
    backend: str
    skipped_steps: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    lineage: tuple[dict[str, Any], ...] = ()
    labels: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def seal(self) -> str:
        """sha256 (hex) of the canonical JSON of all fields."""
        return _seal(self._body())

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is stored, with its seal; `from_json` is the inverse."""
        body = self._body()
        return {**body, "seal": _seal(body)}

    @classmethod
    def from_json(cls, value: Any, where: str = "manifest") -> Manifest:
        """The manifest that a stored object describes.

        `where` names it in errors. Raises CheckpointError with every fault: not a manifest, a format that this jaxml
        does not know, missing or unknown fields, a broken seal.
        """
        faults = verify(value, where)
        if faults:
            raise CheckpointError.from_faults(faults)
        body = {name: item for name, item in value.items() if name != "seal"}
        while body["format"] != FORMAT:
            body = UPGRADES[body["format"]](body)
        body = _decode_numbers(body)
        for name in ("skipped_steps", "lineage", "labels"):
            body[name] = tuple(body[name])
        return cls(**body)

    def _body(self) -> dict[str, Any]:
        return {item.name: _encode_numbers(getattr(self, item.name)) for item in dataclasses.fields(self)}


def verify(value: Any, where: str = "manifest") -> list[Fault]:
    """Every reason for which a stored JSON object cannot be taken as a sealed manifest (empty when it can)."""
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        got = f"keys {sorted(value)[:6]}" if isinstance(value, dict) else repr(value)[:60]
        return [Fault(where, "a JSON object with a format number", got, "point at a checkpoint that jaxml wrote")]
    if value["format"] != FORMAT and value["format"] not in UPGRADES:
        known = ", ".join(map(str, [*sorted(UPGRADES), FORMAT]))
        todo = "open it with the jaxml that wrote it, or a newer one"
        return [Fault(f"format of {where}", f"one of {known}", str(value["format"]), todo)]
    body = {name: item for name, item in value.items() if name != "seal"}
    sealed = value.get("seal")
    if sealed != _seal(body):
        todo = "take another checkpoint: this one was changed or damaged after it was saved"
        return [Fault(f"seal of {where}", f"sha256 {_seal(body)[:12]}... of its content", repr(sealed)[:20], todo)]
    if value["format"] != FORMAT:
        return []
    names = {item.name for item in dataclasses.fields(Manifest)}
    wrong = [(name, "a field", "nothing") for name in sorted(names - set(body))]
    wrong += [(name, "no such field", "a value") for name in sorted(set(body) - names)]
    todo = "open it with the jaxml that wrote it"
    return [Fault(f"{name} of {where}", expected, got, todo) for name, expected, got in wrong]


def leaf_faults(part: str, expected: Mapping[str, list[Any]], got: Mapping[str, list[Any]]) -> list[Fault]:
    """Every leaf in which the tree asked for and the tree that is stored differ in path, shape or dtype."""
    faults = []
    for path in [*expected, *(path for path in got if path not in expected)]:
        wanted, stored = (_describe(side.get(path)) for side in (expected, got))
        if wanted != stored:
            todo = "build the model and optimizer from the checkpoint's own experiment (`jaxml inspect` prints it)"
            faults.append(Fault(f"leaf {part}.{path}", wanted, stored, todo))
    return faults


def _describe(leaf: list[Any] | None) -> str:
    if leaf is None:
        return "no such leaf"
    shape, dtype = leaf
    return f"{dtype}[{','.join(map(str, shape))}]"


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _encode_numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become {"float": "nan"}. Tuples become lists, as JSON reads them back."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_numbers(item) for item in value]
    return value


def _decode_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: _decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_numbers(item) for item in value]
    return value
