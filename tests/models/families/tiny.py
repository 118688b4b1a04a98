"""Tiny published Llamas as these tests write them: config.json and tensors by name, in a directory, whole or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "use_cache": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "multi-query, untied, biases": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "multi-head, three layers": {"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 4},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers 5.24 writes for such a configuration."""
    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    outputs = {
        "self_attn.q_proj": (q_width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, q_width),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in outputs.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                found[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = (width,)
    found["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    return found


def random_tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights far from zero, norms too, so that no term hides."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0.0, 0.4, shape).astype(dtype) for name, shape in shapes(config).items()}


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """The directory; with several shards the tensors are dealt out in turn and an index says where they are."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        return directory
    files = [f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]
    places = {name: files[number % num_shards] for number, name in enumerate(tensors)}
    for file in files:
        part = {name: value for name, value in tensors.items() if places[name] == file}
        safetensors.numpy.save_file(part, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
