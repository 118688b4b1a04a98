"""`service.toml`: the models, the address, who may ask, how much, and who may watch, as data that was checked as a whole.

Reads `config.spec` (suggestions), `errors`, `infer.request`, `serve.rates` and `serve.served`; `launch` serves what it says.
The tables of the file are the dataclasses here, field by field, so nothing is read that has no place, and nothing has a place
that is not read.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxml.config.spec import suggest
from jaxml.errors import ConfigError, Faults
from jaxml.infer.request import Deadlines
from jaxml.serve.rates import DEFAULT_TIER, Tier
from jaxml.serve.served import Limits

HOST, PORT = "127.0.0.1", 8000
MAX_BATCH, MAX_QUEUE = 8, 256
DRAIN_S = 30.0


@dataclass(frozen=True)
class ModelConfig:
    """One model, and how its engine computes: as in `infer.engine.EngineSpec`.

    path: a run, checkpoints or step directory. name: what clients call it ("": the experiment's name). cache_mib: memory for
    keys and values. watchdog_s: a step that takes longer ends the worker, which is started again.
    """

    path: str
    name: str = ""
    mode: Literal["fast", "invariant"] = "fast"
    max_batch: int = MAX_BATCH
    max_queue: int = MAX_QUEUE
    cache_mib: int = 1024
    watchdog_s: float = 120.0


@dataclass(frozen=True)
class OperationsConfig:
    """Where /metrics, /health/live and /health/ready are, for those who run the service. It has no keys."""

    port: int
    host: str = HOST


@dataclass(frozen=True)
class ServiceConfig:
    """A whole service.

    keys: a file of `jaxml keys` ("": everybody may ask). tiers: what a key's tenant may ask for. limits: of one request;
    deadlines: of every request, unless it asks for shorter ones. price_per_device_hour: makes costs known to /metrics and
    the page (0: they are not). request_log: a file that gets a line for each request ("": none, "-": standard error).
    """

    models: tuple[ModelConfig, ...]
    host: str = HOST
    port: int = PORT
    drain_s: float = DRAIN_S
    keys: str = ""
    tiers: tuple[Tier, ...] = (DEFAULT_TIER,)
    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    operations: OperationsConfig | None = None
    price_per_device_hour: float = 0.0
    request_log: str = ""


def read_config(path: Path) -> ServiceConfig:
    """The service that a file describes; paths in it are relative to the file.

    Raises ConfigError with every fault at once: an unknown field (with the nearest known one), a value of another type or out
    of range.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the service in {path}", expected="a TOML file", got=type(error).__name__, todo="check the path"
        ) from error
    except ValueError as error:  # tomllib.TOMLDecodeError, and text that is not UTF-8
        raise ConfigError(f"the service in {path}", expected="TOML", got=str(error)[:200], todo="mend it") from error
    faults = Faults(ConfigError)
    tiers = content.pop("tiers", {})
    config = _read(ServiceConfig, content, "", faults, skip=("tiers",))
    named = _tiers(tiers, faults)
    faults.raise_if_any()
    config = dataclasses.replace(config, tiers=named or (DEFAULT_TIER,))
    _check(config, faults)
    faults.raise_if_any()
    near = path.resolve().parent
    return dataclasses.replace(
        config,
        models=tuple(dataclasses.replace(model, path=_beside(near, model.path)) for model in config.models),
        keys=_beside(near, config.keys),
        request_log=config.request_log if config.request_log == "-" else _beside(near, config.request_log),
    )


def _tiers(value: Any, faults: Faults) -> tuple[Tier, ...]:
    if not isinstance(value, dict):
        faults.add("tiers", expected="tables [tiers.NAME]", got=type(value).__name__, todo="name each tier")
        return ()
    read = [
        _read(Tier, {**table, "name": name} if isinstance(table, dict) else table, f"tiers.{name}", faults)
        for name, table in value.items()
    ]
    return tuple(tier for tier in read if tier is not None)


def _check(config: ServiceConfig, faults: Faults) -> None:
    """Values that are out of range."""

    def at_least(least: float, where: str, table: Any, *names: str) -> None:
        for name in names:
            value = getattr(table, name)
            if value is not None and not least <= value < math.inf:
                faults.add(f"{where}{name}", expected=f"at least {least:g}", got=str(value), todo="correct it")

    if not config.models:
        faults.add("models", expected="at least one [[models]]", got="none", todo="add one, with its path")
    for number, model in enumerate(config.models):
        at_least(1, f"models.{number}.", model, "max_batch", "max_queue", "cache_mib", "watchdog_s")
        if not model.path:
            faults.add(f"models.{number}.path", expected="a directory", got="''", todo="name a run or a checkpoint")
    for tier in config.tiers:
        faults.found += tier.faults()
    at_least(0, "", config, "drain_s", "price_per_device_hour")
    at_least(1, "limits.", config.limits, *(field.name for field in dataclasses.fields(Limits)))
    at_least(0.001, "deadlines.", config.deadlines, *(field.name for field in dataclasses.fields(Deadlines)))


def _read(cls: type[Any], table: Any, where: str, faults: Faults, skip: tuple[str, ...] = ()) -> Any:
    """The dataclass that a table describes, or None and what is wrong with it."""
    if not isinstance(table, dict):
        faults.add(where or "the file", expected="a table", got=type(table).__name__, todo=f"write [{where}]")
        return None
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls) if field.name not in skip}
    before = len(faults.found)
    given: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{where}.{name}".lstrip(".")
        if name not in known:
            faults.add(path, expected="a field that there is", got=name, todo=suggest(name, list(known)))
        else:
            given[name] = _value(hints[name], value, path, faults)
    for name, each in known.items():
        if name not in table and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            faults.add(f"{where}.{name}".lstrip("."), expected="a value", got="nothing", todo=f"add {name}")
    return cls(**given) if len(faults.found) == before else None


def _value(hint: Any, value: Any, path: str, faults: Faults) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # T | None: TOML has no null, so a value is a T.
        return _value(next(each for each in arguments if each is not type(None)), value, path, faults)
    if dataclasses.is_dataclass(hint):
        return _read(typing.cast(type[Any], hint), value, path, faults)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{path}.{number}", faults) for number, item in enumerate(value))
    if origin is Literal and value in arguments:
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    expected = " or ".join(map(repr, arguments)) if origin is Literal else f"a value of type {_name(hint)}"
    faults.add(path, expected=expected, got=repr(value)[:80], todo="correct it")
    return None


def _name(hint: Any) -> str:
    return "list" if typing.get_origin(hint) is tuple else getattr(hint, "__name__", str(hint))


def _beside(directory: Path, path: str) -> str:
    return str(directory / path) if path else ""
