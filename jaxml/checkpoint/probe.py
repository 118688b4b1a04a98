"""A fixed batch whose logits are sealed at save time and recomputed at load: what is served is what was trained.

Reads `errors`; recipes and serving compute the logits and call `record` and `check`. No model and no Orbax here.

Exact where the same program must give the same bits: same backend, device kind, device count, jaxlib, dtype, layout and
(on CPUs, where XLA compiles for the instructions it finds) same processor. Elsewhere a stated bound, and the same top
token wherever the recorded lead of the top token is more than twice that bound.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int32

from jaxml.errors import Fault

TOP = 8

# Largest difference of a logit elsewhere, as a share of the largest recorded logit (at least 1). The dtype is that of
# the products; accelerators may take TF32 or bfloat16 passes for float32 products unless told otherwise.
BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2, "int8": 5e-2, "int8-weights": 2e-3}
ACCELERATOR_BOUND = 2e-2


def probe_tokens(vocab_size: int, length: int) -> Int32[np.ndarray, "2 T"]:
    """Two rows of token ids below `vocab_size`: a stride through the vocabulary, and a multiplicative scramble (Knuth).

    >>> probe_tokens(10, 4).tolist()
    [[0, 2, 5, 7], [1, 6, 7, 2]]
    """
    index = np.arange(length, dtype=np.uint64)
    stride = index * np.uint64(vocab_size) // np.uint64(max(length, 1))
    scrambled = ((index + np.uint64(1)) * np.uint64(2654435761) % np.uint64(2**32)) % np.uint64(vocab_size)
    return np.stack([stride, scrambled]).astype(np.int32)


def record(logits: Float[Any, "... V"], *, compute: str = "", layout: str = "") -> dict[str, Any]:
    """What is sealed about the probe's logits, as JSON.

    compute: dtype name of the model's products ("" means that of the logits). layout: whatever else decides the bits,
    such as the mesh and the execution of the layers; two records with different layouts are held to the bound.
    """
    values = np.ascontiguousarray(jax.device_get(logits))
    flat = values.reshape(-1, values.shape[-1])
    wide = flat.astype(np.float64)
    order = np.argsort(-wide, axis=-1, kind="stable")[:, :TOP]
    return {
        "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
        "shape": list(values.shape),
        "dtype": str(values.dtype),
        "compute": compute or str(values.dtype),
        "top_ids": order.tolist(),
        "top_values": np.take_along_axis(wide, order, axis=-1).tolist(),
        "logsumexp": _logsumexp(wide).tolist(),
        "largest": float(np.max(np.abs(wide))),
        "where": {**_circumstances(), "layout": layout},
    }


def check(recorded: dict[str, Any], logits: Float[Any, "... V"], *, compute: str = "", layout: str = "") -> list[Fault]:
    """Every way in which recomputed logits do not fit the record (empty when they do). Arguments as in `record`."""
    now = record(logits, compute=compute, layout=layout)
    todo = "take another checkpoint, or the jaxml that wrote this one: these weights do not give the sealed logits"
    for name in ("shape", "dtype"):
        if recorded[name] != now[name]:
            return [Fault(f"{name} of the probe's logits", str(recorded[name]), str(now[name]), todo)]
    if recorded["sha256"] == now["sha256"]:
        return []
    if recorded["where"] == now["where"] and recorded["compute"] == now["compute"]:
        worst = f"other bits, a recorded logit is off by {_worst(recorded, logits):.3g}"
        return [Fault("logits of the probe", f"the bits sealed on this {now['where']['backend']}", worst, todo)]
    tolerance = bound(recorded, now)
    faults = []
    worst = _worst(recorded, logits)
    if not worst <= tolerance:
        faults.append(Fault("logits of the probe", f"within {tolerance:.3g} of the record", f"{worst:.3g} off", todo))
    for position, (before, after) in enumerate(zip(recorded["top_ids"], now["top_ids"], strict=True)):
        values = recorded["top_values"][position]
        lead = values[0] - values[1] if len(values) > 1 else 0.0
        if before[0] != after[0] and lead > 2 * tolerance:
            got = f"{after[0]}, where the record leads by {lead:.3g}"
            faults.append(Fault(f"top token at probe position {position}", str(before[0]), got, todo))
    return faults


def bound(recorded: dict[str, Any], now: dict[str, Any]) -> float:
    """The largest difference of a logit that two records made under different circumstances may have."""
    share = max(BOUNDS.get(side["compute"], max(BOUNDS.values())) for side in (recorded, now))
    if share > BOUNDS["float64"] and any(side["where"]["backend"] != "cpu" for side in (recorded, now)):
        share = max(share, ACCELERATOR_BOUND)
    return share * max(1.0, recorded["largest"])


def _worst(recorded: dict[str, Any], logits: Any) -> float:
    """The largest difference at the recorded top tokens and of the logsumexp; two NaNs or two equal infinities: 0."""
    wide = np.asarray(jax.device_get(logits)).astype(np.float64)
    wide = wide.reshape(-1, wide.shape[-1])
    at_top = np.take_along_axis(wide, np.asarray(recorded["top_ids"]), axis=-1)
    got = np.column_stack([at_top, _logsumexp(wide)])
    expected = np.column_stack([np.asarray(recorded["top_values"]), np.asarray(recorded["logsumexp"])])
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0.0, np.abs(got - expected))))


def _logsumexp(wide: Float[np.ndarray, "P V"]) -> Float[np.ndarray, " P"]:
    top = np.max(wide, axis=-1, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(all="ignore"):
        return (shift + np.log(np.sum(np.exp(wide - shift), axis=-1, keepdims=True)))[:, 0]


def _circumstances() -> dict[str, Any]:
    backend, num_processes = jax.default_backend(), jax.process_count()
    # Sums between processes are taken in another order. Records of before know of one process only.
    several = {"num_processes": num_processes} if num_processes > 1 else {}
    return {
        **several,
        "backend": backend,
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "processor": _processor() if backend == "cpu" else "",
    }


def _processor() -> str:
    """The CPU's model and its number of threads, on which XLA's instruction choice and product blocking depend."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} threads"
