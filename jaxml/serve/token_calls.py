"""/tokenize and /detokenize, in the shapes of vLLM: texts to token ids as requests are read, and back.

Reads `serve.requests`, `serve.prompts`, `serve.token_names`, `serve.served`, `infer.text`, `inputs.tokenizers` and
`errors`; the endpoints call it. Nothing of it needs the engine.
"""

from __future__ import annotations

from typing import Any

from jaxml.errors import DataError, RequestError
from jaxml.infer.text import encode_prompt
from jaxml.serve.fields import Fields
from jaxml.serve.prompts import are_ids
from jaxml.serve.requests import opened, read_conversation
from jaxml.serve.served import Served
from jaxml.serve.token_names import TokenNames
from jaxml.serve.tools import TOOL_FIELDS

TOKENIZE_FIELDS = ["model", "prompt", "add_special_tokens", "return_token_strs", "messages", "user", *TOOL_FIELDS]
DETOKENIZE_FIELDS = ["model", "tokens", "user"]


def tokenize(body: Any, served: Served) -> dict[str, Any]:
    """{count, max_model_len, tokens, token_strs} of a prompt, or of a conversation as its template writes it.

    add_special_tokens: whether the token that begins a text is put before a prompt. return_token_strs: what each writes.
    Raises RequestError.
    """
    fields = opened(body, served)
    # The template asks for the next turn, as it does in a chat.
    fields.refuse_others(TOKENIZE_FIELDS, {"add_generation_prompt": (True,)})
    adds_special = fields.boolean("add_special_tokens")
    wants_names = fields.boolean("return_token_strs")
    if fields.values.get("messages") is not None:
        if fields.values.get("prompt") is not None:
            fields.wrong("prompt", "nothing beside messages", "give one of them")
        if adds_special:
            fields.wrong("add_special_tokens", "nothing beside messages: the template writes them", "leave it out")
        ids = [token for _, prompt in read_conversation(fields, served) for token in prompt]
    else:
        for name in TOOL_FIELDS:
            if fields.values.get(name) is not None:
                fields.wrong(name, "messages beside it", "leave it out")
        ids = _encoded(fields, served, adds_special is not False)
    fields.faults.raise_if_any()
    names = TokenNames(served.tokenizer)
    token_strs = [names[token][0] for token in ids] if wants_names else None
    return {"count": len(ids), "max_model_len": served.context_length, "tokens": ids, "token_strs": token_strs}


def detokenize(body: Any, served: Served) -> dict[str, Any]:
    """{prompt}: the text of token ids. Raises RequestError."""
    fields = opened(body, served)
    fields.refuse_others(DETOKENIZE_FIELDS, {})
    tokens = fields.values.get("tokens")
    if not isinstance(tokens, list) or not are_ids(tokens, served.tokenizer):
        fields.wrong("tokens", f"a list of token ids from 0 to {served.tokenizer.vocab_size - 1}")
    fields.faults.raise_if_any()
    return {"prompt": served.tokenizer.decode(tokens or [])}


def _encoded(fields: Fields, served: Served, adds_special: bool) -> list[int]:
    prompt = fields.values.get("prompt")
    if not isinstance(prompt, str):
        fields.wrong("prompt", "text")
        return []
    try:
        has_start = adds_special and served.tokenizer.bos_id is not None
        return encode_prompt(served.tokenizer, prompt) if has_start else served.tokenizer.encode(prompt)
    except (RequestError, DataError) as error:
        fields.adopt("prompt", error)
        return []
