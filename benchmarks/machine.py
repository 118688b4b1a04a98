"""What this machine can do at best: float32 matrix products (GFLOP/s) and matrix-vector bandwidth (GB/s), by JAX.

Shares of the peak and of the bound are stated against these, measured in the same run. `jaxml_decode` reads the second; as
a program this prints both as one JSON object: `python benchmarks/machine.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

# Rows, contracted, columns: training shapes of the 6x6x384 model, and a square one.
PRODUCT_SHAPES = ((4096, 384, 1536), (4096, 1536, 384), (2048, 2048, 2048))
VECTOR_SHAPES = ((4096, 4096),)  # 64 MiB, beyond the cache
# Short calls, so that on a shared machine at least one is not disturbed.
CALLS = 8


def product_gflop_per_s() -> float:
    """The best float32 product over PRODUCT_SHAPES, counted as 2 * M * K * N."""
    multiply = jax.jit(jnp.matmul)
    best = 0.0
    for rows, inner, columns in PRODUCT_SHAPES:
        left, right = normal(rows, inner), normal(inner, columns)
        best = max(best, 2.0 * rows * inner * columns / best_seconds(lambda a=left, b=right: multiply(a, b)))
    return best / 1e9


def vector_gbytes_per_s(shapes: Sequence[tuple[int, int]] = VECTOR_SHAPES) -> float:
    """The best of `W @ x` and `x @ W` over `shapes` of W, float32, counted as one read of W."""
    forms = (jax.jit(lambda w, x, y: w @ x), jax.jit(lambda w, x, y: y @ w))
    best = 0.0
    for rows, columns in shapes:
        operands = normal(rows, columns), normal(columns), normal(rows)
        seconds = min(best_seconds(lambda form=form, given=operands: form(*given)) for form in forms)
        best = max(best, operands[0].nbytes / seconds)
    return best / 1e9


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def best_seconds(call: Callable[[], Array]) -> float:
    """The shortest of CALLS finished calls, after one that compiles."""
    call().block_until_ready()
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps({"product_gflop_per_s": product_gflop_per_s(), "vector_gbytes_per_s": vector_gbytes_per_s()}))
