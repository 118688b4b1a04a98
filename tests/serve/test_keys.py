"""Who has a key is let in and nobody else; the file holds no key, and a service follows its changes."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.cli import keys as verb
from jaxml.errors import ConfigError
from jaxml.infer.request import LANES
from jaxml.serve.keys import Caller, KeyRing, add_key, read_keys, revoke_key

TIERS = {"default": LANES, "free": ("normal", "batch")}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> list[bytes]:
    return [f"Bearer {key}".encode()]


def test_a_key_opens_for_its_tenant_and_the_file_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _, first = add_key(path, "alice")
    _, second = add_key(path, "bob", "free", ("interactive", "batch"))
    ring = KeyRing(path, TIERS)
    assert ring.caller(bearer(first)) == Caller("alice", "default", LANES)
    assert ring.caller(bearer(second)) == Caller("bob", "free", ("batch",)), "never a lane that its tier has not"
    assert ring.caller([b"bearer  " + first.encode()]) is not None, "the scheme has no case"
    assert first not in path.read_text() and first.removeprefix("jaxml-") not in path.read_text()
    assert len(first) >= 43 and first != second
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


@given(st.lists(st.binary(max_size=80), max_size=3))
def test_anything_else_opens_nothing(tmp_path_factory: pytest.TempPathFactory, headers: list[bytes]) -> None:
    ring = getattr(test_anything_else_opens_nothing, "ring", None)
    if ring is None:
        path = tmp_path_factory.mktemp("keys") / "keys.json"
        add_key(path, "alice")
        ring = test_anything_else_opens_nothing.ring = KeyRing(path, TIERS)  # type: ignore[attr-defined]
    assert ring.caller(headers) is None
    assert ring.caller([b"Bearer " + header for header in headers]) is None


def test_headers_that_are_nearly_right_open_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entry, key = add_key(path, "alice")
    ring = KeyRing(path, TIERS)
    for wrong in (key[:-1], key + "x", key.upper(), "", entry.sha256, entry.id, "schlüssel", f"{key} {key}"):
        assert ring.caller(bearer(wrong)) is None
    assert ring.caller([key.encode()]) is None and ring.caller([b"Basic " + key.encode()]) is None
    assert ring.caller(bearer(key) * 2) is None and ring.caller([]) is None


def test_a_change_is_noticed_within_a_second_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    first, key = add_key(path, "alice")
    ring = KeyRing(path, TIERS, clock)
    _, later = add_key(path, "bob")
    assert ring.caller(bearer(later)) is None, "not before a second has passed"
    clock.now_s += 1
    assert ring.caller(bearer(later)) == Caller("bob", "default", LANES)
    good = path.read_text()
    for broken in ("{", "{}", good.replace("jaxml keys 1", "other"), good.replace('"default"', '"unknown"')):
        path.write_text(broken)
        clock.now_s += 1
        assert ring.caller(bearer(key)) is not None
        assert "the keys stay as they were" in caplog.text
        caplog.clear()
    path.unlink()
    clock.now_s += 1
    assert ring.caller(bearer(key)) is not None and "stay as they were" in caplog.text
    path.write_text(good)
    revoke_key(path, first.id)
    clock.now_s += 1
    assert ring.caller(bearer(key)) is None and ring.caller(bearer(later)) is not None


def test_a_file_that_is_not_looked_at_again_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    _, key = add_key(path, "alice")
    ring = KeyRing(path, TIERS, clock)
    looks: list[object] = []
    found = os.stat
    monkeypatch.setattr(os, "stat", lambda *given, **more: looks.append(given) or found(*given, **more))
    for _ in range(10):
        ring.caller(bearer(key))
        clock.now_s += 0.3
    assert len(looks) == 2


def test_what_is_wrong_with_a_file_is_said_at_once_and_no_service_starts_with_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice", "gold")
    with pytest.raises(ConfigError, match="one of default, free"):
        KeyRing(path, TIERS)
    value = json.loads(path.read_text())
    entry = value["keys"][0]
    value["keys"] += [{**entry, "tenant": "a b", "sha256": "x", "lanes": ["fast"]}, {**entry, "extra": 1}, 5]
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError) as refused:
        read_keys(path)
    failed = " ".join(fault.failed for fault in refused.value.faults)
    for part in ("tenant of key 2", "sha256 of key 2", "lanes of key 2", "key 3", "key 4", "id in"):
        assert part in failed
    assert entry["sha256"] not in str(refused.value)
    with pytest.raises(ConfigError, match="jaxml keys add"):
        KeyRing(tmp_path / "none.json", TIERS)
    with pytest.raises(ConfigError, match="tenant"):
        add_key(path.with_name("other.json"), "../alice")
    with pytest.raises(ConfigError, match="the directory"):
        add_key(tmp_path / "nowhere" / "keys.json", "alice")


def add_some(path: Path) -> None:
    for _ in range(5):
        add_key(path, "alice")


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(4) as pool:  # each call has a lock of its own, as another process would
        list(pool.map(add_some, [path] * 4))
    assert len(read_keys(path)) == 20


def test_the_verb_adds_lists_and_revokes(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    added, code = verb.main(["add", str(path), "--tenant", "alice", "--tier", "free", "--lanes", "batch"])
    assert code == 0 and added["text"] == added["key"]
    listed, _ = verb.main(["list", str(path)])
    assert [(row["id"], row["tenant"], row["lanes"]) for row in listed["keys"]] == [(added["id"], "alice", ("batch",))]
    assert added["key"] not in str(listed) and read_keys(path)[0].sha256 not in str(listed)
    assert verb.main(["revoke", str(path), added["id"]])[1] == 0 and read_keys(path) == []
    with pytest.raises(ConfigError, match="key"):
        verb.main(["revoke", str(path), added["id"]])
    with pytest.raises(ConfigError, match="did you mean 'revoke'"):
        verb.main(["revok"])
