"""The tokenizer of a Hugging Face directory: tokenizer.json, what begins and ends a text, and the chat template.

Reads `checkpoint.hf`, `inputs.subword` and `errors`; `recipes.importing` calls it. A chat template is kept as text;
serving renders it in a sandbox.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from jaxml.checkpoint.hf import CONFIG_FILE, read_json_object
from jaxml.errors import CheckpointError
from jaxml.inputs.spec import HuggingFaceTokenizerSpec
from jaxml.inputs.subword import TEMPLATE_FILE, TOKENIZER_FILE, SubwordTokenizer

SETTINGS_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"


def read_tokenizer(directory: str | Path) -> tuple[SubwordTokenizer | None, tuple[str, ...]]:
    """(tokenizer, notes for the report); None where the directory has no tokenizer.json.

    The token that ends a text is the one that tokenizer_config.json names, else the first `eos_token_id` of config.json.
    One that begins a text is taken only where the published tokenizer puts it: by `add_bos_token`, or else by its own
    post-processor. Raises CheckpointError on a settings file that is not JSON or a template that is no text, DataError on
    a tokenizer.json that the library cannot read or that lacks a named token.
    """
    folder = Path(directory)
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None, (f"no {TOKENIZER_FILE}: the model takes and gives token ids only",)
    content = file.read_bytes()
    SubwordTokenizer(HuggingFaceTokenizerSpec(TOKENIZER_FILE), content, str(file))  # refuses what is no tokenizer.json
    library = tokenizers.Tokenizer.from_str(content.decode())
    settings, config, generation = (_json(folder / name) for name in (SETTINGS_FILE, CONFIG_FILE, GENERATION_FILE))
    notes = []
    eos, bos = (_token(role, settings, config, library) for role in ("eos", "bos"))
    if bos and not _begins_texts(bos, settings, library):
        notes.append(f"texts do not begin with {bos}: the published tokenizer does not put it there")
        bos = ""
    further = {*_ids(config, "eos"), *_ids(generation, "eos")} - {library.token_to_id(eos)}
    if further:
        names = ", ".join(f"{number} {library.id_to_token(number)}" for number in sorted(further))
        notes.append(f"answers end with other tokens too, to be given as stop tokens: {names}")
    template, about_template = _chat_template(folder, settings)
    spec = HuggingFaceTokenizerSpec(TOKENIZER_FILE, eos=eos, bos=bos)
    return SubwordTokenizer(spec, content, str(file), chat_template=template), (*notes, *about_template)


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.exists() else {}


def _ids(config: dict[str, Any], role: str) -> list[int]:
    """The ids under `bos_token_id` or `eos_token_id`, which is a number, a list of them, or null."""
    value = config.get(f"{role}_token_id")
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool) and number >= 0]


def _token(role: str, settings: dict[str, Any], config: dict[str, Any], library: tokenizers.Tokenizer) -> str:
    """The text of the token that begins ("bos") or ends ("eos") a text; "" where none is named."""
    named = settings.get(f"{role}_token")
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str):
        return named
    ids = _ids(config, role)
    return (library.id_to_token(ids[0]) or "") if ids else ""


def _begins_texts(bos: str, settings: dict[str, Any], library: tokenizers.Tokenizer) -> bool:
    wanted = settings.get("add_bos_token")
    if isinstance(wanted, bool):
        return wanted
    return library.encode("", add_special_tokens=True).ids[:1] == [library.token_to_id(bos)]


def _chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, list[str]]:
    """(template, notes): that of its own file, else the one of the settings, of several the one named `default`."""
    file = folder / TEMPLATE_FILE
    if file.exists():
        try:
            return file.read_text(encoding="utf-8"), []
        except UnicodeDecodeError as error:
            todo = "mend the file, or remove it to import without a chat template"
            raise CheckpointError(str(file), expected="UTF-8 text", got=str(error), todo=todo) from error
    found = settings.get("chat_template")
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        named = {str(item.get("name")): item.get("template") for item in found}
        others = ", ".join(sorted(set(named) - {"default"}))
        found = named.get("default")
        notes = [f"chat templates that are not taken: {others}"] if others else []
    else:
        notes = []
    if found is not None and not isinstance(found, str):
        raise CheckpointError(
            f"{folder / SETTINGS_FILE}: chat_template",
            expected="a text, or a list of objects with name and template",
            got=repr(found)[:80],
            todo="mend the file, or remove the key to import without a chat template",
        )
    return found, notes
