"""`jaxml keys add|list|revoke FILE`: who may ask a service, as a file of hashes. Reads `serve.keys`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import parser
from jaxml.config.spec import suggest
from jaxml.errors import ConfigError, require_extra

ADD = """Make a new key for a tenant and print it, this once: the file holds its hash alone.

A service that reads the file accepts the key within a second.
example: jaxml keys add keys.json --tenant alice"""
LIST = """Show whose keys there are, without the keys.

example: jaxml keys list keys.json"""
REVOKE = """Take a key out of the file, by the id that `list` shows. A running service refuses it within a second.

example: jaxml keys revoke keys.json 1f2e3d4c"""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Dispatch to `add`, `show` or `revoke`."""
    verbs = {"add": add, "list": show, "revoke": revoke}
    if not arguments or arguments[0] in ("-h", "--help"):
        text = f"usage: jaxml keys add|list|revoke FILE ...\n\nadd: {ADD}\n\nlist: {LIST}\n\nrevoke: {REVOKE}"
        return {"text": text}, 0 if arguments else 2
    if arguments[0] not in verbs:
        todo = suggest(arguments[0], list(verbs))
        raise ConfigError("the verb of `jaxml keys`", expected="add, list or revoke", got=arguments[0], todo=todo)
    require_extra("litserve", "serve")
    return verbs[arguments[0]](arguments[1:])


def add(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """A new key; returns it, with its id."""
    from jaxml.infer.request import LANES
    from jaxml.serve.keys import add_key
    from jaxml.serve.rates import DEFAULT_TIER

    options = parser("keys add", ADD)
    options.add_argument("file", type=Path, help="made if it is not there, for its owner to read alone")
    options.add_argument("--tenant", required=True, help="on whose behalf its requests are")
    options.add_argument("--tier", default=DEFAULT_TIER.name, help="one of service.toml (default: default)")
    options.add_argument("--lanes", nargs="+", choices=LANES, help="where its requests may queue (default: its tier's)")
    given = options.parse_args(arguments)
    key, secret = add_key(given.file, given.tenant, given.tier, tuple(given.lanes) if given.lanes else None)
    note = f"jaxml keys: {key.id} of {key.tenant}, tier {key.tier}; the key is not shown again"
    print(note, file=sys.stderr)  # The key alone is on stdout, for `> FILE`.
    return {"text": secret, "key": secret, "id": key.id, "tenant": key.tenant, "tier": key.tier}, 0


def show(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Whose keys there are."""
    from jaxml.serve.keys import read_keys

    options = parser("keys list", LIST)
    options.add_argument("file", type=Path)
    keys = read_keys(options.parse_args(arguments).file)
    rows = [{name: value for name, value in asdict(key).items() if name != "sha256"} for key in keys]
    lines = [
        f"{key.id}  {key.tenant:16}  {key.tier:12}  {' '.join(key.lanes or ('(lanes of its tier)',)):32}  {key.created}"
        for key in keys
    ]
    return {"text": "\n".join(lines) or "no keys", "keys": rows}, 0


def revoke(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Take a key out; returns whose it was."""
    from jaxml.serve.keys import revoke_key

    options = parser("keys revoke", REVOKE)
    options.add_argument("file", type=Path)
    options.add_argument("id", help="as `jaxml keys list` shows it")
    given = options.parse_args(arguments)
    key = revoke_key(given.file, given.id)
    return {"text": f"jaxml keys: {key.id} of {key.tenant} is revoked", "id": key.id, "tenant": key.tenant}, 0
