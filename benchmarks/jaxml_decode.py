"""Times `LanguageModel.generate` on a checkpoint, greedy, and the best matrix-vector products of the same process.

`decode_rows` starts it as a process of its own; it prints one JSON object.

    python benchmarks/jaxml_decode.py CHECKPOINT --tokens 64 --rows 1 8 [--cache DIR]
"""

from __future__ import annotations

import json

import jax

from benchmarks.bound import bound_tokens_per_s
from benchmarks.decode_clock import PROMPT, arguments, measure
from benchmarks.machine import vector_gbytes_per_s
from jaxml.devices.start import tune_allocator, use_compilation_cache
from jaxml.infer.language_model import LanguageModel
from jaxml.models.spec import DecoderSpec

# Square, a large vocabulary's head, and the size of a whole 124M model: 64, 154 and 512 MB.
VECTOR_SHAPES = ((4096, 4096), (50_257, 768), (16_384, 8192))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--cache", default="", help="where compiled programs are kept")
    args = parser.parse_args()
    tune_allocator()
    if args.cache:
        use_compilation_cache(args.cache)
    model = LanguageModel.open(args.checkpoint)

    def generate(num_rows: int, num_tokens: int) -> list[list[int]]:
        answers = model.generate([list(PROMPT)] * num_rows, temperature=0.0, max_tokens=num_tokens)
        return [list(answer.tokens) for answer in answers]

    # Before and after, so that a slow minute does not lower the bound.
    bandwidth = vector_gbytes_per_s(VECTOR_SHAPES)
    told = measure(generate, args.rows, args.tokens, args.quick)
    bandwidth = max(bandwidth, vector_gbytes_per_s(VECTOR_SHAPES))
    spec = model.opened.model
    assert isinstance(spec, DecoderSpec)
    for num_rows in args.rows:
        told[f"bound_{num_rows}"] = bound_tokens_per_s(spec, num_rows, len(PROMPT), args.tokens, bandwidth)
    print(json.dumps({"jax": jax.__version__, "vector_gbytes_per_s": bandwidth, **told}))


if __name__ == "__main__":
    main()
