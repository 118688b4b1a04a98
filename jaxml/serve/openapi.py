"""Our own OpenAPI description: what the paths of a language model take, from the tables that the parsers read.

Reads `serve.requests`, `serve.sampling_fields`, `serve.formats`, `serve.embeddings`, `serve.token_calls`, `serve.served`
and `infer.request`; `serve.endpoints` answers /openapi.json with it. What a schema cannot say (one field against another,
ids against the vocabulary, text against the tokenizer) is refused with a 400 that names the field.
"""

from __future__ import annotations

from typing import Any

from jaxml.infer.request import MAX_BIAS, MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_SEED
from jaxml.serve import formats
from jaxml.serve.embeddings import EMBEDDING_FIELDS, FORMATS
from jaxml.serve.fields import MAX_INTEGER
from jaxml.serve.prompts import ROLE_OF
from jaxml.serve.requests import CHAT_FIELDS, COMPLETION_FIELDS, LANE_OF_TIER, SHORTEST_TIMEOUT_S
from jaxml.serve.sampling_fields import NUMBERS
from jaxml.serve.served import Limits
from jaxml.serve.token_calls import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from jaxml.serve.tools import FUNCTION_NAME

VERSION = "3.1.0"
TEXT: dict[str, Any] = {"type": "string"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
ID: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}

AT_LEAST_ONE: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}


def describe(limits: Limits = Limits()) -> dict[str, Any]:
    """The whole document."""
    schemas = {
        "Completion": _object(COMPLETION_FIELDS, _fields(limits), ["prompt"]),
        "Chat": _object(CHAT_FIELDS, _fields(limits) | {"logprobs": BOOLEAN, "max_tokens": AT_LEAST_ONE}, ["messages"]),
        "Embeddings": _object(EMBEDDING_FIELDS, _fields(limits), ["input"]),
        "Tokenize": _object(TOKENIZE_FIELDS, _fields(limits), []),
        "Detokenize": _object(DETOKENIZE_FIELDS, _fields(limits), ["tokens"]),
        "Message": _message(limits),
        "Error": _error(),
    }
    posted = {
        "/v1/completions": ("Completion", "Text that goes on from a prompt."),
        "/v1/chat/completions": ("Chat", "The assistant's next turn of a conversation."),
        "/v1/embeddings": ("Embeddings", "A vector for each text."),
        "/tokenize": ("Tokenize", "The token ids of a text or a conversation."),
        "/v1/tokenize": ("Tokenize", "The token ids of a text or a conversation."),
        "/detokenize": ("Detokenize", "The text of token ids."),
        "/v1/detokenize": ("Detokenize", "The text of token ids."),
    }
    paths: dict[str, Any] = {path: {"post": _posted(name, summary)} for path, (name, summary) in posted.items()}
    model = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    paths["/v1/models"] = {"get": _operation("The models that are served.")}
    paths["/v1/models/{model}"] = {"get": {**_operation("One of them."), "parameters": [model]}}
    paths["/openapi.json"] = {"get": _operation("This document.")}
    info = {"title": "jaxml", "version": "1", "description": "Every field is honoured, or refused by its name."}
    return {"openapi": VERSION, "info": info, "paths": paths, "components": {"schemas": schemas}}


def _fields(limits: Limits) -> dict[str, Any]:
    """The schema of each field, whichever body it is in."""
    tiers = {"enum": ["auto", *LANE_OF_TIER]}
    stop = {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}
    tool = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _function()},
        "required": ["type", "function"],
        "additionalProperties": False,
    }
    include = {"type": "object", "properties": {"include_usage": BOOLEAN}, "additionalProperties": False}
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    numbers = {name: {"type": "number", "minimum": low, "maximum": high} for name, (low, high) in NUMBERS.items()}
    numbers["top_p"] = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    return {
        **numbers,
        **formats.described(),
        "model": TEXT,
        "user": TEXT,
        "prompt": _texts_or_ids(limits.prompts),
        "input": _texts_or_ids(limits.inputs),
        "messages": _list({"$ref": "#/components/schemas/Message"}, 1, limits.messages),
        "tools": _list(tool, 0, limits.tools),
        "tool_choice": {"enum": ["none", "auto"]},
        "max_tokens": COUNT | {"maximum": MAX_INTEGER},
        "max_completion_tokens": AT_LEAST_ONE,
        "min_tokens": COUNT | {"maximum": MAX_INTEGER},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.choices},
        "top_k": COUNT | {"maximum": MAX_INTEGER},
        "seed": COUNT | {"maximum": MAX_SEED},
        "logprobs": COUNT | {"maximum": MAX_LOGPROBS},
        "top_logprobs": COUNT | {"maximum": MAX_LOGPROBS},
        "stop": {"anyOf": [stop, _list(stop, 0, limits.stop_strings)]},
        "stop_token_ids": _list(ID, 0, limits.stop_tokens),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": bias,
            "maxProperties": MAX_BIASED_TOKENS,
        },
        "ignore_eos": BOOLEAN,
        "echo": BOOLEAN,
        "stream": BOOLEAN,
        "stream_options": include,
        "receipt": BOOLEAN,
        "service_tier": tiers,
        "timeout_s": {"type": "number", "minimum": SHORTEST_TIMEOUT_S, "maximum": limits.timeout_s},
        "encoding_format": {"enum": list(FORMATS)},
        "dimensions": AT_LEAST_ONE,
        "add_special_tokens": BOOLEAN,
        "return_token_strs": BOOLEAN,
        "tokens": {"type": "array", "items": ID},
    }


def _message(limits: Limits) -> dict[str, Any]:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": TEXT},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    function = {
        "type": "object",
        "properties": {"name": TEXT | {"pattern": f"^{FUNCTION_NAME.pattern}$"}, "arguments": TEXT},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    call = {
        "type": "object",
        "properties": {"id": TEXT, "type": {"const": "function"}, "function": function},
        "required": ["id", "type", "function"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLE_OF)},
            "content": {"anyOf": [TEXT, _list(part, 1, limits.content_parts), {"type": "null"}]},
            "tool_calls": _list(call, 0, limits.tool_calls),
            "tool_call_id": TEXT,
        },
        "required": ["role"],
        "additionalProperties": False,
    }


def _function() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": TEXT | {"pattern": f"^{FUNCTION_NAME.pattern}$"},
            "description": TEXT,
            "parameters": {"type": "object"},
            "strict": BOOLEAN,
        },
        "required": ["name"],
        "additionalProperties": False,
    }


def _texts_or_ids(most: int) -> dict[str, Any]:
    ids = {"type": "array", "items": ID, "minItems": 1}
    return {"anyOf": [TEXT, ids, _list(TEXT, 1, most), _list(ids, 1, most)]}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(names: list[str], fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """A body of these fields; each may be null, which is as if it were not there, unless it is required."""
    properties = {name: _or_null(fields[name], name in required) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _or_null(schema: dict[str, Any], is_required: bool) -> dict[str, Any]:
    return schema if is_required else {"anyOf": [schema, {"type": "null"}]}


def _posted(name: str, summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {**_operation(summary), "requestBody": {"required": True, "content": content}}


def _operation(summary: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer, in OpenAI's shape; a stream is text/event-stream"},
            "default": {"description": "why there is none", "content": error},
        },
    }


def _error() -> dict[str, Any]:
    maybe = {"anyOf": [TEXT, {"type": "null"}]}
    properties = {"message": TEXT, "type": TEXT, "param": maybe, "code": maybe}
    inner = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
