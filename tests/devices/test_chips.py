"""Peaks are known for known chips and for nothing else."""

from __future__ import annotations

import pytest

from jaxml.devices.chips import PEAK_FLOPS_PER_S, peak_flops_per_s


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("cpu", "float32"), ("NVIDIA GeForce RTX 9999", "bfloat16"), ("TPU v4", "float64"), ("Tesla T4", "bfloat16")],
)
def test_unknown_chips_and_dtypes_have_no_peak(kind, dtype):
    assert peak_flops_per_s(kind, dtype) is None


@pytest.mark.parametrize("kind", PEAK_FLOPS_PER_S)
def test_known_chips_are_between_a_tera_and_ten_peta_and_bfloat16_is_not_slower(kind):
    bfloat16, float32 = (peak_flops_per_s(kind, dtype) for dtype in ("bfloat16", "float32"))
    assert 1e12 < float32 < 1e16
    assert bfloat16 is None or float32 <= bfloat16
