"""A published config.json, key by key: what a family reads, what does not matter, and a refusal of everything else.

Reads `errors`; each family makes its spec with a `PublishedConfig`. No jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxml.errors import CheckpointError, Faults

# Keys that change no logit, by what they are about.
NOTES = """_name_or_path dtype finetuning_task is_llama_config prefix problem_type tokenizer_class torch_dtype
transformers.js_config transformers_version unsloth_fixed unsloth_version"""
TRAINING = "attention_dropout hidden_dropout id2label initializer_range label2id task_specific_params"
EXECUTION = """_attn_implementation _attn_implementation_autoset chunk_size_feed_forward max_sequence_length
output_attentions output_hidden_states output_scores pretraining_tp return_dict return_dict_in_generate tf_legacy_loss
torchscript use_bfloat16 use_cache"""
GENERATION = """bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
repetition_penalty sep_token_id suppress_tokens temperature top_k top_p typical_p"""
HARMLESS = frozenset(f"{NOTES} {TRAINING} {EXECUTION} {GENERATION}".split())
# What the tokenizer's reader takes from the same file.
TOKEN_IDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})


def ignored_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config.json that change no logit and are therefore not read, sorted."""
    return tuple(sorted(HARMLESS & set(config)))


class PublishedConfig:
    """Reads keys with their defaults and collects every fault; `finish` raises them, unread keys among them.

    A default of None means that the key has to be there.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "config.json"):
        self.values = values
        self.name = name
        self.faults = Faults(CheckpointError)
        self._read: set[str] = set()

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1 (1 where it is faulty, so that reading goes on)."""
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.refuse(key, "a whole number, at least 1", value)
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
        self.refuse(key, "a number above 0", value)
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        self.refuse(key, "true or false", value)
        return default

    def only(self, key: str, *allowed: Any, todo: str = "") -> None:
        """Refuses any value but those allowed; the key may be absent or null."""
        value = self._value(key, allowed[0] if allowed else None)
        if value is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed)) or "no such key: what it asks for is not implemented"
            self.refuse(key, expected, value, todo)

    def inner(self, key: str) -> PublishedConfig | None:
        """The object under a key, to be read in the same way; None where the key is absent or null."""
        value = self._value(key, {}) or {}
        if not isinstance(value, Mapping):
            self.refuse(key, "an object", value)
            return None
        inner = PublishedConfig(value, f"{self.name}: {key}")
        inner.faults = self.faults
        return inner if value else None

    def refuse(self, key: str, expected: str, got: Any, todo: str = "") -> None:
        """Note a fault of a key."""
        shown = "nothing" if got is None else repr(got)[:80]
        todo = todo or "take a model whose configuration has it, or mend config.json if it is wrong"
        self.faults.add(f"{self.name}: {key}", expected=expected, got=shown, todo=todo)

    def refuse_unread(self) -> None:
        """Note every key that was not read and is not known to change nothing."""
        for key in sorted(set(self.values) - self._read - HARMLESS - TOKEN_IDS):
            todo = "remove the key from config.json if it changes nothing; else this model is not supported yet"
            self.refuse(key, "a key that this family is known to have", self.values[key], todo)

    def finish(self) -> None:
        """Raise CheckpointError with every fault, unread keys among them."""
        self.refuse_unread()
        self.faults.raise_if_any()

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value
