"""A keyed bijection of [0, n): the order of the rows of an epoch, and its inverse, evaluated at single points.

Reads nothing; `data.order` uses it. An alternating Feistel network (Luby & Rackoff 1988) over the smallest power of two
that holds n, with cycle walking (Black & Rogaway 2002): a value outside [0, n) is encrypted again until it is inside,
which takes less than two rounds on average. The round function is the finaliser of SplitMix64. Not cryptography.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64, UInt64

ROUNDS = 8  # even: the halves may differ by a bit and change sides every round
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUND_KEYS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * _GOLDEN


def mix(values: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """SplitMix64's finaliser (Steele et al. 2014): a bijection of 64-bit words that looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_keys(seed: int, source: int, epochs: Int64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """One key for each (seed, source, epoch)."""
    keys = np.full(epochs.shape, seed, np.uint64)
    for word in (np.full(epochs.shape, source, np.uint64), epochs.astype(np.uint64)):
        keys = mix(keys + _GOLDEN) + word
    return mix(keys + _GOLDEN)


def permute(indices: Int64[np.ndarray, " B"], n: int, keys: UInt64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """Where each index of [0, n) goes under its own key.

    >>> sorted(permute(np.arange(5), 5, np.full(5, 7, np.uint64)).tolist())
    [0, 1, 2, 3, 4]
    """
    return _walk(_forward, indices, n, keys)


def unpermute(values: Int64[np.ndarray, " B"], n: int, keys: UInt64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """The inverse of `permute`."""
    return _walk(_backward, values, n, keys)


Network = Callable[[np.ndarray, int, np.ndarray], np.ndarray]


def _walk(network: Network, values: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    num_bits = (n - 1).bit_length()
    if num_bits == 0:
        return np.zeros_like(values)
    out = network(values.astype(np.uint64), num_bits, keys)
    while (outside := np.flatnonzero(out >= np.uint64(n))).size:
        out[outside] = network(out[outside], num_bits, keys[outside])
    return out.astype(np.int64)


def _forward(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
    for number in range(ROUNDS):
        left, right = right, left ^ (_round(right, keys, number) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _backward(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
    for number in reversed(range(ROUNDS)):
        left_bits, right_bits = right_bits, left_bits
        left, right = right ^ (_round(left, keys, number) & _mask(left_bits)), left
    return (left << np.uint64(right_bits)) | right


def _round(half: np.ndarray, keys: np.ndarray, number: int) -> np.ndarray:
    return mix((keys + _ROUND_KEYS[number]) ^ half)


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)
