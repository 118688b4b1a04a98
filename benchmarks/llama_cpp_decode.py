"""The other opponent in decoding: llama.cpp in float32 through llama-cpp-python, one row, greedy. No jax.

`decode_rows` starts it as a process of its own; it prints one JSON object on its last line. Two ways are measured and the
faster one counts: llama.cpp's own calls (decode, greedy sampler) with a float32 cache, and `Llama.generate` with the float16
cache that is its default.

    python benchmarks/llama_cpp_decode.py MODEL.gguf --tokens 64
"""

from __future__ import annotations

import ctypes
import itertools
import json

import llama_cpp

from benchmarks.decode_clock import PROMPT, arguments, measure


class Greedy:
    """A model with room for one text, from its beginning at every call."""

    def __init__(self, path: str, num_slots: int, threads: int):
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = num_slots
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def __call__(self, num_tokens: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        fed, found = list(PROMPT), []
        while len(found) < num_tokens:
            batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * len(fed))(*fed), len(fed))
            if llama_cpp.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            fed = [llama_cpp.llama_sampler_sample(self._sampler, self._context, -1)]
            found += fed
        return found


class High:
    """The same by the class that users take, as it comes."""

    def __init__(self, path: str, num_slots: int, threads: int):
        self._llama = llama_cpp.Llama(path, n_ctx=num_slots, n_threads=threads, n_threads_batch=threads, verbose=False)

    def __call__(self, num_tokens: int) -> list[int]:
        self._llama.reset()
        return list(itertools.islice(self._llama.generate(PROMPT, temp=0.0), num_tokens))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("gguf")
    args = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    found = []
    for way in (Greedy, High):
        model = way(args.gguf, len(PROMPT) + args.tokens, args.threads)
        told = measure(lambda rows, num_tokens, model=model: [model(num_tokens)], [1], args.tokens, args.quick)
        found.append(told | {"way": way.__name__})
    best = max(found, key=lambda told: told["tokens_per_s_1"])
    print(json.dumps({"llama-cpp-python": llama_cpp.__version__, **best}))


if __name__ == "__main__":
    main()
