"""Jinja templates of strangers: Jinja's immutable sandbox, with every step, character and second counted.

Reads `inputs.template_meter` and `errors`; `inputs.chat` imports it when a conversation is rendered, for it needs Jinja
(the extra `serve`).

Functions and settings are those that published Hugging Face chat templates are written for. Jinja's own sandbox keeps a
template away from the interpreter and bounds neither its time nor its memory. Here it cannot loop, recurse or build text
without end: each block that is entered (a round of a loop, a branch, a macro), call, filter, slice, list and `+ * ** % ~`
is a step, and the sizes of what steps make are added up. Methods and filters that can make much out of little are refused
or measured first. At the limits a template may hold some gigabytes, for small objects take more room than their size.
Not bounded is one single comparison, sorting or hashing of lists that a template has nested into themselves again and
again; a template that is not trusted that far belongs into a process of its own.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS, do_round
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jaxml.errors import RequestError
from jaxml.inputs.template_meter import MeteredContext, OverLimit, TemplateLimits, joined_alike, text_of

# What a template may raise: anything that an expression of Jinja can.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
TEXT_METHODS = frozenset(
    """capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper
    join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper""".split()  # noqa: SIM905
)
COUNTED_FILTERS = """abs capitalize count d default dictsort first float groupby int items last length list lower map
    max min reject rejectattr reverse select selectattr sort title trim unique upper""".split()  # noqa: SIM905
MAX_INTEGER_BITS = 4096
MAX_INDENT = 16
MAX_DATE_FORMAT = 100
MAX_PRECISION = 20


class MeteredCode(CodeGenerator):
    """Writes a step into each block of the Python code that a template becomes, and around what makes texts and lists."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("context.spend()")
        super().blockvisit(nodes, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("concat = context.written_together")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.concatenated((")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._counted(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _counted(self, write: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("context.counted(")
        write(node, frame)
        self.write(")")


class Generation(Extension):
    """`{% generation %}` marks for training what the model writes; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up, without what has no bound."""

    code_generator_class = MeteredCode
    context_class = MeteredContext
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions = (Generation, LoopControlExtension)
        # Not optimized: constants would be made without being counted.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions, finalize=written, cache_size=0
        )
        own = {"join": join, "replace": replace, "round": rounded, "safe": text_of, "string": text_of, "tojson": tojson}
        self.filters = {name: counted_filter(FILTERS[name]) for name in COUNTED_FILTERS} | own
        del self.globals["lipsum"]
        further: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals.update(further)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in TEXT_METHODS
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            raise SecurityError("formatting with % has no bound; join texts with ~")
        if operator == "*":
            for times, repeated in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(repeated, str | bytes | list | tuple):
                    context.meter.count(len(repeated) * max(times, 0))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            context.meter.count(
                0 if left.bit_length() * right <= MAX_INTEGER_BITS else context.meter.limits.characters + 1
            )
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, int) and made.bit_length() > MAX_INTEGER_BITS:
            raise OverLimit(f"a whole number of more than {MAX_INTEGER_BITS} bits")
        context.spend(made)
        return made

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in ("join", "replace"):
            return (context.joined if name == "join" else context.replaced)(owner, *args)
        made = super().call(context, obj, *args, **kwargs)
        context.spend(made)
        return made


@dataclass(frozen=True)
class CompiledTemplate:
    """A template that can be rendered. Threads may share it."""

    template: jinja2.Template
    limits: TemplateLimits

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises RequestError for what the template raises, and beyond a limit."""
        pieces: list[str] = []
        try:
            for piece in self._pieces(variables):
                pieces.append(piece)
        except TEMPLATE_ERRORS as error:
            raise refused(error) from error
        return "".join(pieces)

    def _pieces(self, variables: Mapping[str, Any]) -> Iterator[str]:
        context: Any = self.template.new_context(dict(variables))
        context.start(self.limits)
        size = 0
        for piece in self.template.root_render_func(context):
            size += len(piece)
            if size > self.limits.characters:
                raise OverLimit(f"a result of more than {self.limits.characters} characters")
            yield piece


@functools.lru_cache(maxsize=16)
def compile_template(source: str, limits: TemplateLimits = TemplateLimits()) -> CompiledTemplate:
    """Source to something that renders. Raises RequestError for a source that is too large or no template."""
    num_bytes = len(source.encode("utf-8", errors="replace"))
    if num_bytes > limits.template_bytes:
        raise refused(OverLimit(f"a template of {num_bytes} bytes, more than {limits.template_bytes}"))
    try:
        environment: Any = MeteredEnvironment()
        environment.concat = functools.partial(_concatenated, limits)
        return CompiledTemplate(environment.from_string(source), limits)
    except TEMPLATE_ERRORS as error:
        raise refused(error) from error


def refused(error: Exception) -> RequestError:
    """The error of a caller whose conversation the template could not render."""
    said = " ".join(str(error).split())[:200]
    return RequestError(
        "messages",
        expected="a conversation that the model's chat template renders",
        got=f"{type(error).__name__}: {said}",
        todo="change the messages as it asks, or correct the checkpoint's chat_template.jinja",
    )


@jinja2.pass_context
def written(context: MeteredContext, value: Any) -> str:
    text = text_of(value)
    context.spend(text)
    return text


def counted_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's, and a step for what it makes."""
    kind = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def counted(context: MeteredContext, *args: Any, **kwargs: Any) -> Any:
        wanted = {"context": context, "environment": context.environment, "eval_context": context.eval_ctx}
        first = () if kind is None else (wanted[kind.name],)
        return context.counted(function(*first, *args, **kwargs))

    return counted


def rounded(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not 0 <= precision <= MAX_PRECISION:
        raise ValueError(f"a precision from 0 to {MAX_PRECISION}")
    return do_round(value, precision, method)


@jinja2.pass_context
def join(context: MeteredContext, values: Iterable[Any], separator: str = "") -> str:
    return context.joined(separator, values)


@jinja2.pass_context
def replace(context: MeteredContext, text: Any, old: str, new: str, count: int | None = None) -> str:
    return context.replaced(text_of(text), old, new, -1 if count is None else count)


@jinja2.pass_context
def tojson(
    context: MeteredContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: without HTML escapes. Characters are never escaped to ASCII."""
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise ValueError(f"an indent from 0 to {MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return context.joined("", _spending(context, encoder.iterencode(_escaped(context, value))))


def _escaped(context: MeteredContext, value: Any) -> Any:
    """A value whose texts of a class of their own (`inputs.chat`) escape themselves, for the encoder sees no quotes in them."""
    context.spend()
    if isinstance(value, str):
        return value.json_escaped() if hasattr(value, "json_escaped") else value
    if isinstance(value, dict):
        return {_escaped(context, key): _escaped(context, item) for key, item in value.items()}
    return [_escaped(context, item) for item in value] if isinstance(value, list | tuple) else value


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    if len(format) > MAX_DATE_FORMAT:
        raise ValueError(f"a date format of at most {MAX_DATE_FORMAT} characters")
    return datetime.datetime.now().strftime(format)


def _spending(context: MeteredContext, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        context.spend(piece)
        yield piece


def _concatenated(limits: TemplateLimits, pieces: Iterable[str]) -> str:
    """What a block that is called by its name has written."""
    texts = list(pieces)
    if sum(map(len, texts)) > limits.characters:
        raise OverLimit(f"a text of more than {limits.characters} characters")
    return joined_alike("", texts)
