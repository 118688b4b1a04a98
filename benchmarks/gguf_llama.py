"""A published Llama (float32, `published`) as a GGUF file for llama.cpp. Needs gguf; runs in the peers' environment.

    python benchmarks/gguf_llama.py DIRECTORY OUT.gguf

What llama.cpp expects of the architecture `llama`: rotary pairs that are neighbours, where Hugging Face pairs the halves of
a head; a SentencePiece vocabulary with a score and a type for each token; a head that is missing is the embedding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import read

# gguf.TokenType, by number so that `vocabulary` needs NumPy alone.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
UNMERGED = -1e4  # below the score of every token that a merge makes
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection [N * H, D], in each head from (x0.., y0..) to (x0, y0, x1, y1, ..).

    >>> interleaved(np.arange(8).reshape(8, 1), 2).ravel().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tensors_of(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GGUF's names, queries and keys permuted. Raises KeyError for a tensor that a Llama does not have."""
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    found = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in WHOLE:
            found[f"{WHOLE[stem]}.weight"] = tensor
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if part in heads:
            tensor = interleaved(tensor, heads[part])
        found[f"blk.{layer}.{NAMES[part]}.weight"] = tensor
    return found


def vocabulary(tokenizer: Mapping[str, Any] | None, size: int) -> tuple[list[str], list[float], list[int]]:
    """(texts, scores, types) in the order of ids. `tokenizer`: a tokenizer.json of merges with bytes as fallback; None
    invents texts. A token's score is minus the rank of the merge that makes it."""
    if tokenizer is None:
        texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))][:size]
        texts += [f"t{index}" for index in range(len(texts), size)]
        ranks: dict[str, int] = {}
        special = {"<s>", "</s>"}
    else:
        ids = tokenizer["model"]["vocab"]
        texts = sorted(ids, key=ids.__getitem__)
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["model"]["merges"]]
        ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
        special = {added["content"] for added in tokenizer["added_tokens"] if added["special"]} - {"<unk>"}
    types = []
    for text in texts:
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        types.append(UNKNOWN if text == "<unk>" else CONTROL if text in special else BYTE if is_byte else NORMAL)
    scores = [-float(ranks[text]) if text in ranks else UNMERGED for text in texts]
    return texts, scores, types


def write_gguf(directory: Path, out: Path) -> Path:
    """The model in `directory` at `out`, in float32; returns it."""
    import gguf

    config, tensors = read(directory)
    place = directory / "tokenizer.json"
    tokenizer = json.loads(place.read_text()) if place.exists() else None
    texts, scores, types = vocabulary(tokenizer, config["vocab_size"])
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(directory.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    for name, tensor in tensors_of(config, tensors).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


if __name__ == "__main__":
    written = write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps({"path": str(written), "bytes": written.stat().st_size}))
