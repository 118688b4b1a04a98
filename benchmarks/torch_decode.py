"""The opponent in decoding: transformers' `generate` on torch's CPU, float32, eager, greedy, with its cache. No jax.

`decode_rows` starts it as a process of its own; it prints one JSON object on its last line.

    python benchmarks/torch_decode.py gpt2 --tokens 64 --rows 1 8
    python benchmarks/torch_decode.py DIRECTORY_OF_A_LLAMA --tokens 199
"""

from __future__ import annotations

import json

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from benchmarks.decode_clock import PROMPT, arguments, measure

GPT2 = "gpt2"  # random weights in the shape of GPT-2 124M, which is the default of GPT2Config


def load(model: str) -> PreTrainedModel:
    """A Llama from its directory, or a random GPT-2."""
    if model == GPT2:
        torch.manual_seed(0)
        loaded = GPT2LMHeadModel(GPT2Config())
    else:
        loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    # Nothing ends an answer early, as for the other rivals.
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded.eval()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = load(args.model)

    def generate(num_rows: int, num_tokens: int) -> list[list[int]]:
        prompts = torch.tensor([PROMPT] * num_rows)
        with torch.inference_mode():
            answers = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
            )
        return answers[:, len(PROMPT) :].tolist()

    told = measure(generate, args.rows, args.tokens, args.quick)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **told}))


if __name__ == "__main__":
    main()
