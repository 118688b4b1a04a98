"""What must be the same in all processes of a run: the experiment, the start, the code, and later the data.

Reads `recipes.experiment`, `config.spec` and `data.prepared`; `recipes.train` compares these before the first step.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

import jaxml
from jaxml.config.spec import leaves
from jaxml.data.prepared import Prepared
from jaxml.recipes.experiment import Experiment

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def run_facts(experiment: Experiment, start: str) -> dict[str, str]:
    """Name to value. Places of files may differ from machine to machine; what is in them may not (`data_facts`)."""
    fields = {
        path: repr(value)
        for path, value in leaves(experiment)
        if not path.endswith(".path") and path != "data.prepared"
    }
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in PACKAGES}
    return {**fields, "the start": start, "the code of jaxml": code_fingerprint(), **versions}


def data_facts(prepared: Prepared) -> dict[str, str]:
    """The fingerprints of the prepared data and of its tokenizer."""
    return {
        "the fingerprint of the data": prepared.fingerprint[:16],
        "the fingerprint of the tokenizer": prepared.tokenizer_fingerprint[:16],
    }


@cache
def code_fingerprint() -> str:
    """16 hexadecimal digits over all source files of the package, wherever it is installed."""
    root, digest = Path(jaxml.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
