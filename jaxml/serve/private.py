"""The directory that the processes of one server share: the engine's socket, and what its worker has to report.

Reads `errors`; `lifecycle` makes and removes it, the worker's loops write to it. Only this user can enter it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from jaxml import errors
from jaxml.errors import Fault, JaxmlError

# sun_path of a unix socket's address, with its terminating zero (104 on macOS).
MAX_SOCKET_PATH = 103


@dataclass(frozen=True)
class Private:
    """`path` has mode 0700. It is passed to the worker, so it holds nothing but that."""

    path: str

    @classmethod
    def create(cls) -> Private:
        """A new one, where temporary files go; in /tmp if the path of a socket there would be too long."""
        path = tempfile.mkdtemp(prefix="jaxml-serve-")
        if len(cls(path).socket) > MAX_SOCKET_PATH:
            shutil.rmtree(path)
            path = tempfile.mkdtemp(prefix="jaxml-serve-", dir="/tmp")
        return cls(path)

    @property
    def socket(self) -> str:
        return os.path.join(self.path, "engine.sock")

    def write_card(self, card: dict[str, Any]) -> None:
        """The worker can answer from now on. card: plain values that say what is served."""
        self._write("card.json", card)

    def card(self) -> dict[str, Any] | None:
        """What `write_card` wrote, or None as long as it has not."""
        return self._read("card.json")

    def write_failure(self, error: JaxmlError) -> None:
        """Why the worker is about to end."""
        value = {"error": type(error).__name__, "faults": [vars(fault) for fault in error.faults]}
        self._write("failure.json", value)

    def failure(self) -> JaxmlError | None:
        """The error that `write_failure` was given, or None."""
        value = self._read("failure.json")
        if value is None:
            return None
        kind = getattr(errors, value["error"], JaxmlError)
        return kind.from_faults([Fault(**fault) for fault in value["faults"]])

    def forget(self) -> None:
        """What a worker wrote that has ended."""
        for name in ("card.json", "failure.json"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.path, name))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        temporary = os.path.join(self.path, f".{name}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, os.path.join(self.path, name))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.path, name), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None
