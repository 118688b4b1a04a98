"""API keys: the file that holds their hashes, whose a request is, and adding or revoking a key while the service runs.

Reads `errors`, `infer.request` and `serve.rates`; `serve.guard` asks whose a request is, `cli.keys` changes the file.

A key is 32 random bytes. Its SHA-256 is what the file holds: nobody can search 2**256 keys for a hash, so a slow hash
(bcrypt, argon2), which protects passwords that people choose, would only cost time in every request. A key is shown once,
when it is made, and stands nowhere else.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxml.errors import ConfigError, Faults
from jaxml.infer.request import LANES, Lane
from jaxml.serve.rates import DEFAULT_TIER

logger = logging.getLogger(__name__)

FORMAT = "jaxml keys 1"
PREFIX = "jaxml-"
# How old what is known of the file may be when a request comes, in seconds.
REFRESH_S = 1.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Caller:
    """On whose behalf a request is. lanes: where it may queue."""

    tenant: str
    tier: str
    lanes: tuple[Lane, ...] = LANES


# Whoever asks a service that has no keys.
LOCAL = Caller("local", "local")


@dataclass(frozen=True)
class Key:
    """A key as the file holds it. id: names it, and says nothing of it. lanes: None for those of its tier."""

    id: str
    tenant: str
    tier: str
    sha256: str
    created: str
    lanes: tuple[Lane, ...] | None = None


def read_keys(path: Path, tiers: Collection[str] | None = None) -> list[Key]:
    """The keys in a file. tiers: those that are known (None: any). Raises ConfigError with every fault at once."""
    faults = Faults(ConfigError)
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _unusable(path, type(error).__name__, f"jaxml keys add {path} --tenant NAME") from error
    except ValueError as error:
        raise _unusable(path, "no JSON", "bring back an older copy, or make a new file") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("keys"), list):
        raise _unusable(path, "something else", "bring back an older copy, or make a new file")
    keys = [_key(item, f"key {number} of {path}", tiers, faults) for number, item in enumerate(content["keys"], 1)]
    for what in ("id", "sha256"):
        values = [item[what] for item in content["keys"] if isinstance(item, dict) and what in item]
        if len(set(map(str, values))) != len(values):
            faults.add(f"{what} in {path}", expected="each once", got="one twice", todo="remove one of the two keys")
    faults.raise_if_any()
    return [key for key in keys if key is not None]


def add_key(
    path: Path, tenant: str, tier: str = DEFAULT_TIER.name, lanes: tuple[Lane, ...] | None = None
) -> tuple[Key, str]:
    """A new key in the file, which is made if it is not there; and the key itself, which nobody can find out later.

    Raises ConfigError: a name that cannot be one, a file that is not usable.
    """
    key = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    added = Key(secrets.token_hex(4), tenant, tier, _hash(key.encode()), now, lanes)
    faults = Faults(ConfigError)
    _key(_as_json(added), "the key", None, faults)
    faults.raise_if_any()
    with _changing(path):
        keys = read_keys(path) if path.exists() else []
        _write(path, [*keys, added])
    return added, key


def revoke_key(path: Path, id: str) -> Key:
    """Takes a key out of the file; a running service refuses it within a second. Raises ConfigError if it is not there."""
    with _changing(path):
        keys = read_keys(path)
        found = [key for key in keys if key.id == id]
        if not found:
            known = ", ".join(key.id for key in keys) or "none"
            raise ConfigError(
                f"key {id[:40]}", expected=f"one of {path}", got=f"there is {known}", todo="see keys list"
            )
        _write(path, [key for key in keys if key.id != id])
    return found[0]


class KeyRing:
    """The keys that a service accepts, from a file that may change meanwhile.

    The file is looked at when a request comes and the last look is older than a second, so an idle service does nothing.
    One that cannot be read, or that is wrong, is logged, and the keys that were good before stay.
    tiers: the lanes of each tier that is known.
    """

    def __init__(
        self,
        path: Path,
        tiers: dict[str, tuple[Lane, ...]],
        now: Callable[[], float] = time.monotonic,
    ):
        """Raises ConfigError when the file is not usable, or has a key of another tier."""
        self._path, self._tiers, self._now = path, tiers, now
        self._seen = self._state()
        self._callers = self._read()
        self._looked_s = now()

    def caller(self, authorization: Iterable[bytes]) -> Caller | None:
        """Whose request it is by the values of its `Authorization` headers: exactly one, `Bearer KEY`. None: nobody's."""
        self._refresh()
        values = list(authorization)
        if len(values) != 1:
            return None
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given = _hash(key.strip()).encode()
        found = None
        # All of them, whichever it is: how long it takes says nothing.
        for sha256, caller in self._callers:
            if hmac.compare_digest(sha256, given):
                found = caller
        return found

    def _refresh(self) -> None:
        now = self._now()
        if now - self._looked_s < REFRESH_S:
            return
        self._looked_s = now
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._callers = self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.warning("the keys have changed: %d now", len(self._callers))

    def _read(self) -> list[tuple[bytes, Caller]]:
        keys = read_keys(self._path, self._tiers)
        return [(key.sha256.encode(), Caller(key.tenant, key.tier, self._lanes(key))) for key in keys]

    def _lanes(self, key: Key) -> tuple[Lane, ...]:
        allowed = self._tiers[key.tier]
        return allowed if key.lanes is None else tuple(lane for lane in allowed if lane in key.lanes)

    def _state(self) -> tuple[int, int, int] | None:
        """What differs between two versions of the file. None: it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _key(value: Any, where: str, tiers: Collection[str] | None, faults: Faults) -> Key | None:
    """The key that an entry of the file describes, or None and what is wrong with it."""
    names = {field.name for field in fields(Key)}
    if not isinstance(value, dict) or not names - {"lanes"} <= set(value) <= names:
        got = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
        faults.add(where, expected=f"an object of {', '.join(sorted(names))}", got=got[:200], todo="make a new key")
        return None
    before = len(faults.found)
    expected = "1 to 64 letters, digits, dots, hyphens or underscores, the first a letter or a digit"
    for name in ("id", "tenant", "tier"):
        if not isinstance(value[name], str) or not NAME.fullmatch(value[name]):
            faults.add(f"{name} of {where}", expected=expected, got=repr(value[name])[:80], todo="choose another")
    if not isinstance(value["sha256"], str) or not SHA256.fullmatch(value["sha256"]):
        faults.add(f"sha256 of {where}", expected="64 hexadecimal digits", got="something else", todo="make a new key")
    lanes = value.get("lanes")
    if lanes is not None and (not isinstance(lanes, list) or not lanes or not all(lane in LANES for lane in lanes)):
        faults.add(f"lanes of {where}", expected=f"some of {', '.join(LANES)}", got=repr(lanes)[:80], todo="correct it")
    if tiers is not None and value["tier"] not in tiers:
        known = ", ".join(tiers)
        faults.add(f"tier of {where}", expected=f"one of {known}", got=repr(value["tier"])[:80], todo="define the tier")
    if len(faults.found) > before:
        return None
    named: dict[str, Any] = {**value, "lanes": None if lanes is None else tuple(lanes)}
    return Key(**named)


def _as_json(key: Key) -> dict[str, Any]:
    value = asdict(key)
    return {**value, "lanes": list(key.lanes)} if key.lanes is not None else {**value, "lanes": None}


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One process at a time, by a lock on the directory. Raises ConfigError when there is none."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(path, f"{type(error).__name__} of its directory", "make the directory") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _write(path: Path, keys: list[Key]) -> None:
    """The whole file or the old one, whatever happens meanwhile; only its owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "keys": [_as_json(key) for key in keys]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # Not there any more once it has its name.


def _unusable(path: Path, got: str, todo: str) -> ConfigError:
    return ConfigError(f"the keys in {path}", expected=f"a file of {FORMAT!r}", got=got, todo=todo)
