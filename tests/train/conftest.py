"""Parity laws run in float64: a test that asks for `float64` has it switched on for its whole body."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
