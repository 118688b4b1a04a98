"""`jaxml prove EXPERIMENT`: prove an experiment right on eight fake CPU devices. Reads `prove.prove`."""

from __future__ import annotations

import os
from typing import Any

from jaxml.cli.experiment_file import cache_directory, load_experiment, parser

DESCRIPTION = """Prove that the sharded, accumulated, resumed, restored and served versions of an experiment are one model.

EXPERIMENT is a file with config(), or a run directory. A small copy of it (the rule is printed) runs on eight fake CPU
devices in float64. A table goes to stderr; proof.json and proof.html to --out. The exit code is 1 when a claim fails.
Any field can be overridden, as in `jaxml train`: --mesh.fsdp 4 --train.accumulate 2"""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, prove, and return what was found."""
    options = parser("prove", DESCRIPTION)
    options.add_argument("file", metavar="EXPERIMENT", help="experiment file with config(), or a run directory")
    options.add_argument("--out", help="where proof.json and proof.html go (default: proofs/NAME)")
    options.add_argument(
        "--only", nargs="+", metavar="CLAIM", help="claims to try, such as: sharded resumed (default: all)"
    )
    options.add_argument("--no-float32", action="store_true", help="leave out the errors in float32: half the time")
    options.add_argument("--no-serve", action="store_true", help="do not start the service")
    given, overrides = options.parse_known_args(arguments)
    experiment = load_experiment(given.file, overrides)
    os.environ["JAX_PLATFORMS"] = "cpu"  # here, and in the service that is started; read when jax is imported
    import jax

    from jaxml.devices.start import use_compilation_cache

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    use_compilation_cache(cache_directory())
    from jaxml.prove.prove import KINDS, prove

    only = [kind for kind in given.only or KINDS if kind != "served" or not given.no_serve]
    out = given.out or os.path.join("proofs", experiment.name)
    proof = prove(experiment, out, only=only, wants_float32=not given.no_float32, cache_dir=cache_directory())
    files = {"page": os.path.join(out, "proof.html"), "json": os.path.join(out, "proof.json")}
    found = {name: value for name, value in proof.to_json().items() if name not in ("rule", "format")}
    return {"text": f"{proof.verdict()}: {files['page']}", **found, **files}, 0 if proof.is_passed else 1
