"""The whole decoder in NumPy, float64, one row, one head and one query at a time: slow and hard to get wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxml.models.spec import AttentionSpec, DecoderSpec, MlpSpec, NormSpec, RopeSpec

erf = np.vectorize(math.erf)


def features(spec: DecoderSpec, params: dict[str, Any], tokens, positions, segments) -> np.ndarray:
    """[B, T, D] for integer arrays [B, T]; padding (segment 0) is zero."""
    return np.stack([_row(spec, params, *row) for row in zip(tokens, positions, segments, strict=True)])


def logits(spec: DecoderSpec, params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    y = x @ (params["embed"]["table"].T if spec.tied_head else params["head"]["kernel"])
    if spec.head_bias:
        y = y + params["head"]["bias"]
    return y if spec.logit_softcap is None else spec.logit_softcap * np.tanh(y / spec.logit_softcap)


def _row(spec: DecoderSpec, params: dict[str, Any], tokens, positions, segments) -> np.ndarray:
    x = params["embed"]["table"][tokens]
    if spec.position is not None:
        x = x + params["positions"]["table"][positions]
    for layer in range(spec.num_layers):
        index, depth = layer % len(spec.blocks), layer // len(spec.blocks)
        block, leaves = spec.blocks[index], _layer(params["blocks"][str(index)], depth)
        normed = norm(x, block.norm, leaves["attention_norm"])
        x = x + attention(normed, block.attention, leaves["attention"], positions, segments, spec.is_causal)
        x = x + mlp(norm(x, block.norm, leaves["mlp_norm"]), block.mlp, leaves["mlp"])
    return norm(x, spec.final_norm, params["final_norm"]) * (segments != 0)[:, None]


def _layer(tree: Any, depth: int) -> Any:
    return {key: _layer(value, depth) for key, value in tree.items()} if isinstance(tree, dict) else tree[depth]


def _linear(x: np.ndarray, leaves: dict[str, np.ndarray]) -> np.ndarray:
    return x @ leaves["kernel"] + leaves.get("bias", 0.0)


def norm(x: np.ndarray, spec: NormSpec, leaves: dict[str, np.ndarray]) -> np.ndarray:
    if spec.kind == "layer":
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + spec.epsilon)
    else:
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.epsilon)
    return y * leaves["scale"] + leaves.get("bias", 0.0)


def rope(x: np.ndarray, position: int, spec: RopeSpec) -> np.ndarray:
    """One head vector turned pair by pair, as complex numbers."""
    half = len(x) // 2
    turned = x.copy()
    for i in range(half):
        z = complex(x[i], x[i + half]) * np.exp(1j * position * spec.base ** (-2 * i / len(x)))
        turned[i], turned[i + half] = z.real, z.imag
    return turned


def attention(x, spec: AttentionSpec, leaves, positions, segments, is_causal: bool) -> np.ndarray:
    num_tokens, group = len(x), spec.num_heads // spec.num_kv_heads

    def heads(name: str, num_heads: int, has_norm: bool) -> np.ndarray:
        y = _linear(x, leaves[name]).reshape(num_tokens, num_heads, spec.head_width)
        return norm(y, spec.qk_norm, leaves[f"{name}_norm"]) if has_norm else y

    q = heads("query", spec.num_heads, spec.qk_norm is not None)
    k = heads("key", spec.num_kv_heads, spec.qk_norm is not None)
    v = heads("value", spec.num_kv_heads, False)
    mixed = np.zeros((num_tokens, spec.num_heads, spec.head_width))
    for t in range(num_tokens):
        for n in range(spec.num_heads):
            seen = [s for s in range(num_tokens) if _sees(t, s, spec.window, is_causal, segments)]
            scores = np.array([_score(q[t, n], k[s, n // group], positions[t], positions[s], spec) for s in seen])
            weights = np.exp(scores - scores.max())
            mixed[t, n] = (weights / weights.sum()) @ v[seen, n // group]
    return _linear(mixed.reshape(num_tokens, -1), leaves["output"])


def _sees(t: int, s: int, window: int | None, is_causal: bool, segments) -> bool:
    is_near = window is None or abs(t - s) < window
    return segments[t] == segments[s] and is_near and (s <= t or not is_causal)


def _score(q: np.ndarray, k: np.ndarray, q_position: int, k_position: int, spec: AttentionSpec) -> float:
    if spec.rope is not None:
        q, k = rope(q, q_position, spec.rope), rope(k, k_position, spec.rope)
    score = q @ k / math.sqrt(len(q))
    return score if spec.logit_softcap is None else spec.logit_softcap * math.tanh(score / spec.logit_softcap)


def mlp(x: np.ndarray, spec: MlpSpec, leaves) -> np.ndarray:
    up = _linear(x, leaves["up"])
    gate = _linear(x, leaves["gate"]) if "gate" in leaves else None
    hidden = {
        "gelu": lambda: up * (1 + erf(up / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: gelu_tanh(up),
        "squared_relu": lambda: np.maximum(up, 0) ** 2,
        "swiglu": lambda: gate / (1 + np.exp(-gate)) * up,
        "geglu": lambda: gelu_tanh(gate) * up,
    }[spec.activation]()
    return _linear(hidden, leaves["down"])


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
