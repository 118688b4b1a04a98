"""A service.toml is read whole or refused whole, and each of its fields reaches what it names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxml.cli import serve as verb
from jaxml.errors import ConfigError
from jaxml.infer.request import Deadlines
from jaxml.serve import launch
from jaxml.serve.address import ServeError
from jaxml.serve.endpoints import EngineSpec
from jaxml.serve.guard import Door
from jaxml.serve.keys import add_key
from jaxml.serve.private import Private
from jaxml.serve.rates import DEFAULT_TIER, Tier
from jaxml.serve.served import Limits
from jaxml.serve.service_config import ModelConfig, OperationsConfig, ServiceConfig, read_config
from tests.infer.written import write_classifier, write_language_model
from tests.serve.servers import free_port

WHOLE = """
host = "0.0.0.0"
port = {port}
drain_s = 5
keys = "keys.json"
price_per_device_hour = 2.5
request_log = "requests.log"

[operations]
port = {operations}

[limits]
body_bytes = 5000
choices = 3

[deadlines]
queue_s = 10
total_s = 60.5

[[models]]
name = "first"
path = "model"
mode = "invariant"
max_batch = 3
max_queue = 7
cache_mib = 2
watchdog_s = 30

[[models]]
name = "second"
path = "model"

[tiers.free]
requests_per_minute = 60
tokens_per_minute = 10_000
max_concurrent = 4
lanes = ["normal", "batch"]

[tiers.paid]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("service")
    write_language_model(directory / "model")
    add_key(directory / "keys.json", "alice", "free")
    path = directory / "service.toml"
    path.write_text(WHOLE.format(port=free_port(), operations=free_port()))
    return path


def test_every_field_is_read(file: Path) -> None:
    config = read_config(file)
    near = file.parent
    model = str(near / "model")
    assert config == ServiceConfig(
        models=(ModelConfig(model, "first", "invariant", 3, 7, 2, 30.0), ModelConfig(model, "second")),
        host="0.0.0.0",
        port=config.port,
        drain_s=5.0,
        keys=str(near / "keys.json"),
        tiers=(Tier("free", 60, 10_000, 4, ("normal", "batch")), Tier("paid")),
        limits=Limits(body_bytes=5000, choices=3),
        deadlines=Deadlines(queue_s=10.0, total_s=60.5),
        operations=OperationsConfig(config.operations.port if config.operations else 0),
        price_per_device_hour=2.5,
        request_log=str(near / "requests.log"),
    )
    # No field of the file is as by default, so that the test above notices one that is not read.
    default = ServiceConfig(())
    assert not [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(default, f.name)]
    first = dataclasses.asdict(config.models[0])
    assert not [f.name for f in dataclasses.fields(ModelConfig) if first[f.name] == f.default]


def test_what_it_says_reaches_the_engines_the_endpoints_and_the_door(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` starts processes with what it is given; `test_door` sees what those do."""
    told: dict[str, Any] = {}

    def run(lit_api_in: Any, door_of: Any, **more: Any) -> int:
        lit_api = lit_api_in(Private("nowhere"))
        told.update(more, lit_api=lit_api, door=door_of(lit_api))
        return 0

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "require_no_backend", lambda: None)
    config = read_config(file)
    assert launch.serve_config(config, cache_dir="cache") == 0
    assert (told["address"], told["drain_s"]) == (("0.0.0.0", config.port), 5.0)
    spec, opens, door = told["lit_api"].spec, told["lit_api"].loop._opens, told["door"]
    assert isinstance(spec, EngineSpec) and isinstance(door, Door)
    assert (spec._limits, spec._deadlines) == (config.limits, config.deadlines)
    assert door.max_body_bytes == 5000 and door.metrics.cost is not None and door.metrics.log is not None
    assert door.operations is not None and door.keys is not None
    assert door.rates.open("alice", "free").headers()["x-ratelimit-limit-tokens"] == "10000"
    assert list(opens) == ["first", "second"]
    assert opens["first"].path == str(file.parent / "model" / "1") and opens["first"].cache_dir == "cache"
    engine, card = dataclasses.replace(opens["first"], cache_dir="")(lambda events: None, lambda: None)
    assert (engine.spec.mode, engine.spec.max_batch, engine.spec.max_queue) == ("invariant", 3, 7)
    assert (engine.spec.cache_bytes, engine.spec.watchdog_s) == (2 * 2**20, 30.0)
    assert card["name"] == "first" and card["has_embeddings"] and card["embedding_size"] > 0


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text("""
prt = 1
port = "8000"
[operations]
[limits]
body_byte = 1
[[models]]
max_batch = true
mode = "quick"
[tiers.free]
requests_per_hour = 5
""")
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    faults = {fault.failed: fault for fault in refused.value.faults}
    assert set(faults) == {
        "prt",
        "port",
        "operations.port",
        "limits.body_byte",
        "models.0.max_batch",
        "models.0.mode",
        "models.0.path",
        "tiers.free.requests_per_hour",
    }
    assert "did you mean 'port'" in faults["prt"].todo and "body_bytes" in faults["limits.body_byte"].todo
    assert "'fast' or 'invariant'" in faults["models.0.mode"].expected


def test_values_out_of_range_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text("""
models = [{path = "", max_batch = 0, watchdog_s = nan}]
drain_s = -1
price_per_device_hour = inf
limits = {choices = 0}
deadlines = {total_s = 0}
tiers = {free = {requests_per_minute = 0, lanes = []}}
""")
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert {fault.failed for fault in refused.value.faults} == {
        "models.0.path",
        "models.0.max_batch",
        "models.0.watchdog_s",
        "drain_s",
        "price_per_device_hour",
        "limits.choices",
        "deadlines.total_s",
        "tiers.free.requests_per_minute",
        "tiers.free.lanes",
    }
    for content in ("models = []", "x = ", "models = 5", "tiers = 5\nmodels = [{path = 'a'}]"):
        path.write_text(content)
        with pytest.raises(ConfigError):
            read_config(path)
    with pytest.raises(ConfigError, match="a TOML file"):
        read_config(tmp_path / "none.toml")


def test_models_that_cannot_be_served_are_named_together(file: Path, tmp_path: Path) -> None:
    write_classifier(tmp_path / "b")
    good = str(file.parent / "model")
    models = [ModelConfig(good), ModelConfig(good), ModelConfig(str(tmp_path / "b"), "b")]
    models += [ModelConfig(str(tmp_path / "none"), "gone"), ModelConfig(good, "a/b")]
    with pytest.raises(ConfigError) as refused:
        launch.config_app(ServiceConfig(tuple(models)))
    failed = "\n".join(f"{fault.failed}: {fault.got}" for fault in refused.value.faults)
    for part in ("models: small twice", "model b: path: a classifier", "model gone: ", "model a/b: name"):
        assert part in failed


def test_without_tiers_there_is_one_without_limits(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text("[[models]]\npath = 'a'\n")
    assert read_config(path).tiers == (DEFAULT_TIER,)


def test_a_public_bind_needs_keys_and_that_of_operations_permission(file: Path) -> None:
    config = read_config(file)
    with pytest.raises(ServeError, match="--keys"):
        launch.serve_config(dataclasses.replace(config, keys=""))
    public = OperationsConfig(free_port(), "0.0.0.0")
    with pytest.raises(ServeError, match=r"operations\.host"):
        launch.serve_config(dataclasses.replace(config, operations=public))
    unknown = dataclasses.replace(config, tiers=(DEFAULT_TIER,))
    with pytest.raises(ConfigError, match="tier of key 1"):
        launch.serve_config(unknown)


def test_the_command_takes_a_file_or_a_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(launch, "serve_config", lambda *given, **more: served.append((given, more)) or 0)
    monkeypatch.setattr(launch, "serve", lambda *given, **more: served.append((given, more)) or 0)
    assert verb.main(["--config", str(file), "--allow-remote"])[1] == 0
    ((config,), more) = served[0]
    assert config == read_config(file) and more["allow_remote"]
    with pytest.raises(ConfigError) as refused:
        verb.main(["--config", str(file), "runs/a", "--max-batch", "3"])
    assert [fault.failed for fault in refused.value.faults] == ["RUN_OR_CKPT", "--max-batch"]
    with pytest.raises(ConfigError, match="what to serve"):
        verb.main([])
    given = ["--keys", "k", "--operations-port", "9000", "--price", "2", "--request-log", "-"]
    verb.main(["runs/a", *given])
    assert served[1][1]["access"] == launch.Access("k", (DEFAULT_TIER,), ("127.0.0.1", 9000), 2.0, "-")
