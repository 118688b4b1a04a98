"""Peak arithmetic of known chips, so that model FLOP utilisation is given where it is known and nowhere else.

Reads no other jaxml file; `observe` and `plan` use it. Sources: the makers' data sheets, dense figures (no sparsity).
One entry is what JAX calls one device: for TPU v2 and v3 a core, half a chip. A float32 product runs, at JAX's default
precision, on the matrix units: in TF32 on NVIDIA chips that have it, in bfloat16 passes on TPUs; its peak is theirs.
"""

from __future__ import annotations

# device_kind -> (bfloat16, float32) FLOP/s. None: the chip has no matrix unit for that dtype.
PEAK_FLOPS_PER_S: dict[str, tuple[float | None, float]] = {
    "TPU v2": (22.5e12, 22.5e12),
    "TPU v3": (61.5e12, 61.5e12),
    "TPU v4": (275e12, 275e12),
    "TPU v5 lite": (197e12, 197e12),
    "TPU v5e": (197e12, 197e12),
    "TPU v5": (459e12, 459e12),
    "TPU v5p": (459e12, 459e12),
    "TPU v6 lite": (918e12, 918e12),
    "TPU v6e": (918e12, 918e12),
    "Tesla V100-SXM2-16GB": (None, 15.7e12),
    "Tesla V100-SXM2-32GB": (None, 15.7e12),
    "Tesla T4": (None, 8.1e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA L4": (121e12, 60e12),
    "NVIDIA L40S": (362e12, 183e12),
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12),
    "NVIDIA H200": (989e12, 494e12),
    "NVIDIA B200": (2250e12, 1125e12),
}


def peak_flops_per_s(device_kind: str, dtype: str) -> float | None:
    """FLOP/s of one device for products of `dtype`; None for a chip or dtype that is not known here (any CPU).

    >>> peak_flops_per_s("TPU v4", "bfloat16")
    275000000000000.0
    >>> peak_flops_per_s("cpu", "float32") is None
    True
    """
    bfloat16, float32 = PEAK_FLOPS_PER_S.get(device_kind, (None, None))
    return {"bfloat16": bfloat16, "float32": float32}.get(dtype)
