"""Llamas as others publish them, config.json and model.safetensors: random ones written, any float32 one read. NumPy alone.

`decode_rows` writes the model that jaxml, transformers and llama.cpp all load; `gguf_llama`, which runs in the peers'
environment, reads it. https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Tensors = dict[str, np.ndarray]


def llama_config(
    *, vocab_size: int, context: int, width: int, layers: int, heads: int, kv_heads: int, mlp_width: int
) -> dict[str, Any]:
    """config.json of a Llama with a tied head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "intermediate_size": mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape (out, in) of every tensor of a Llama with a tied head and no biases."""
    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (q_width, width),
            "self_attn.k_proj": (kv_width, width),
            "self_attn.v_proj": (kv_width, width),
            "self_attn.o_proj": (width, q_width),
            "mlp.gate_proj": (mlp, width),
            "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (width,)}


def random_llama(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Float32 weights of variance 1 / fan-in, norms of one: activations keep their size, so that answers vary."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        else:
            tensors[name] = draw.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[1]))
    return tensors


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """config.json and model.safetensors in `directory`, which is made; returns it. Tensors are float32."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with (directory / WEIGHTS).open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").data)
    return directory


def read(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """(config, tensors by name) of a directory with one file of float32 weights. Raises ValueError for another dtype."""
    config = json.loads((directory / CONFIG).read_text())
    content = np.fromfile(directory / WEIGHTS, np.uint8)
    size = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + size].tobytes())
    data, tensors = content[8 + size :], {}
    for name, told in header.items():
        if name == "__metadata__":
            continue
        if told["dtype"] != "F32":
            raise ValueError(f"{directory / WEIGHTS}: {name} is {told['dtype']}, expected F32")
        begin, end = told["data_offsets"]
        tensors[name] = data[begin:end].view("<f4").reshape(told["shape"])
    return config, tensors
