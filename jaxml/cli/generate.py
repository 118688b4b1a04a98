"""`jaxml generate CKPT --prompt TEXT`: let a language model go on with a text. Reads `infer.language_model`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import ConfigError
from jaxml.infer.request import Sampling

DESCRIPTION = """Go on with a text, by the model of a checkpoint (a run directory, its checkpoints folder, or one step's folder).

The text is printed; with --stream as it comes. With --json: `text`, `tokens`, `finish_reason` and the rest as one object."""

# flag -> (type, what it does); a flag that is not given leaves the default of `Sampling`.
FLAGS: dict[str, tuple[type, str]] = {
    "max-tokens": (int, "the most tokens to generate (default: what fits into the context)"),
    "min-tokens": (int, "do not stop before so many"),
    "temperature": (float, "0 takes the most likely token (default 1)"),
    "top-k": (int, "only the k most likely tokens (default 0: all)"),
    "top-p": (float, "the smallest set of tokens with this share of the probability (default 1)"),
    "min-p": (float, "tokens at least this share as likely as the most likely one (default 0)"),
    "repetition-penalty": (float, "above 1 discourages tokens of the prompt and the answer"),
    "presence-penalty": (float, "subtracted from the logits of tokens in the answer"),
    "frequency-penalty": (float, "the same, for each occurrence"),
    "seed": (int, "the same seed gives the same answer (default: a fresh one)"),
    "num-logprobs": (int, "log-probabilities of the tokens and of so many most likely ones, with --json"),
}


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, open, generate; returns the answer."""
    options = parser("generate", DESCRIPTION)
    options.add_argument("path", help="run directory, checkpoints folder or step folder")
    options.add_argument("--prompt", default="", help="the text to go on with")
    options.add_argument("--stop", action="append", default=[], help="a string that ends the answer (may be repeated)")
    options.add_argument("--num-beams", type=int, default=1, help="beam search over so many sequences (no sampling)")
    options.add_argument("--length-penalty", type=float, default=1.0, help="of beam search: above 0 favours long ones")
    options.add_argument("--stream", action="store_true", help="print the text as it comes")
    for flag, (kind, text) in FLAGS.items():
        options.add_argument(f"--{flag}", type=kind, help=text)
    given = options.parse_args(arguments)
    chosen = {name: getattr(given, name) for name in (flag.replace("-", "_") for flag in FLAGS)}
    fields = {name: value for name, value in chosen.items() if value is not None}
    sampling = Sampling(stop=tuple(given.stop), **fields).checked()
    if given.num_beams > 1 and (given.stream or set(fields) - {"max_tokens"} or given.stop):
        raise ConfigError(
            "--num-beams",
            expected="beam search alone, with --max-tokens and --length-penalty",
            got="flags of sampling or --stream beside it",
            todo="leave them out: beam search looks for the most likely answer as a whole",
        )
    return _generate(given, sampling)


def _generate(given: Any, sampling: Sampling) -> tuple[dict[str, Any], int]:
    from jaxml.devices.start import tune_allocator, use_compilation_cache
    from jaxml.infer.language_model import LanguageModel

    tune_allocator()
    use_compilation_cache(cache_directory())
    model = LanguageModel.open(given.path)
    if given.num_beams > 1:
        answer = model.beam_search(
            given.prompt,
            num_beams=given.num_beams,
            max_tokens=sampling.max_tokens,
            length_penalty=given.length_penalty,
        )[0]
        return {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}, 0
    if not given.stream:
        completion = model.generate(given.prompt, sampling)
        return dataclasses.asdict(completion), 0
    events = []
    for event in model.stream(given.prompt, sampling):
        print(event.text, end="", flush=True)
        events.append(event)
    print()
    text = "".join(event.text for event in events)
    tokens = [token for event in events for token in event.tokens]
    logprobs = [dataclasses.asdict(item) for event in events for item in event.logprobs]
    result = {"text": text, "tokens": tokens, "finish_reason": events[-1].finish_reason, "logprobs": logprobs}
    return {**result, "is_printed": True}, 0
