"""Llama in NumPy, float64, read straight from the published tensor names: one row, one head and one query at a time.

It shares nothing with jaxml: neither the canonical leaves nor their layout, so that a wrong name map shows here.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def logits(config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """[T, V] for one row of tokens at positions 0 to T-1."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    epsilon = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + _attention(
            config, weights, f"{at}.self_attn", _norm(x, weights[f"{at}.input_layernorm.weight"], epsilon)
        )
        y = _norm(x, weights[f"{at}.post_attention_layernorm.weight"], epsilon)
        gate, up = (_linear(y, weights, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, weights, f"{at}.mlp.down_proj")
    x = _norm(x, weights["model.norm.weight"], epsilon)
    return x @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def _linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _attention(config: dict[str, Any], weights: dict[str, np.ndarray], at: str, x: np.ndarray) -> np.ndarray:
    num_heads, num_kv_heads, width = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = (_linear(x, weights, f"{at}.{name}_proj").reshape(len(x), -1, width) for name in "qkv")
    q, k = (np.stack([_turn(row, p, config["rope_theta"]) for p, row in enumerate(rows)]) for rows in (q, k))
    mixed = np.zeros_like(q)
    for head in range(num_heads):
        kv = head // (num_heads // num_kv_heads)
        for t in range(len(x)):
            scores = k[: t + 1, kv] @ q[t, head] / np.sqrt(width)
            share = np.exp(scores - scores.max())
            mixed[t, head] = share / share.sum() @ v[: t + 1, kv]
    return _linear(mixed.reshape(len(x), -1), weights, f"{at}.o_proj")


def _turn(heads: np.ndarray, position: int, base: float) -> np.ndarray:
    """Each head vector's halves as the real and imaginary parts of numbers turned by position * base^(-2i/H)."""
    half = heads.shape[-1] // 2
    turn = np.exp(1j * position * base ** (-np.arange(half) / half))
    turned = (heads[:, :half] + 1j * heads[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)
