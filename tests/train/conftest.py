"""Parity laws run in float64: a test that asks for `float64` has it switched on for its whole body.

XLA compiles with few optimisations here, which is a third of the time for a step; the laws are about mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="package")
def _quick_compiles() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
