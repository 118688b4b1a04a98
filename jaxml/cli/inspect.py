"""`jaxml inspect PATH [OTHER]`: describe a checkpoint without loading it, or compare two; `--flags`: XLA flags to paste.

Reads `checkpoint.compare` and `devices.flags`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxml.cli.experiment_file import parser
from jaxml.devices.flags import PRESETS

DESCRIPTION = """Describe the checkpoint at PATH (a run directory, its checkpoints folder, or one step's folder): spec, sizes,
step, metrics, lineage. With OTHER: every field and every leaf in which the two differ; exit code 1 when they do.

With --flags and no PATH: XLA flags for each backend that overlap communication with computation, each with its reason. They
are shown, and nothing is set."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, read, and return a description or a comparison."""
    options = parser("inspect", DESCRIPTION)
    options.add_argument("path", nargs="?", help="run directory, checkpoints folder or step folder")
    options.add_argument("other", nargs="?", help="another one to compare with")
    options.add_argument("--flags", action="store_true", help="XLA flags for overlap, as environment lines")
    options.add_argument("--backend", choices=list(PRESETS), help="with --flags: those of one backend")
    given = options.parse_args(arguments)
    if given.flags == (given.path is not None):
        options.error("name a checkpoint, or ask for --flags")
    if given.flags:
        return flags_of([given.backend] if given.backend else list(PRESETS))
    from jaxml.checkpoint.compare import compare, describe

    if given.other is not None:
        return _compared(compare(given.path, given.other))
    return _described(describe(given.path))


def flags_of(backends: list[str]) -> tuple[dict[str, Any], int]:
    """The presets of some backends, as text and as data."""
    lines = []
    for backend in backends:
        preset = PRESETS[backend]
        width = max(len(str(flag)) for flag in preset.flags)
        lines += [f"# {backend}: {preset.checked}", preset.line]
        lines += [f"#   {flag!s:{width}}  {flag.reason}" for flag in preset.flags]
    shown = {backend: asdict(PRESETS[backend]) | {"line": PRESETS[backend].line} for backend in backends}
    return {"text": "\n".join(lines), "flags": shown}, 0


def _described(found: Any) -> tuple[dict[str, Any], int]:
    manifest = found.manifest
    lines = [f"{found.directory}, step {found.step} (complete steps: {', '.join(map(str, found.steps))})"]
    lines += [f"  damaged: step {step}: {text}" for step, text in found.damaged.items()]
    lines += [
        f"  {name}: {size.num_values:,} values in {size.num_leaves} leaves, {size.num_bytes / 2**20:.2f} MiB"
        f" ({size.disk_bytes / 2**20:.2f} MiB on disk)"
        for name, size in found.parts.items()
    ]
    lines += [f"  {name}: {value:.6g}" for name, value in manifest.metrics.items()]
    lines += [
        f"  started {entry.get('started')} ({entry.get('mode')}, {entry.get('source')})" for entry in manifest.lineage
    ]
    lines += [f"  versions: {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"]
    lines += [f"  seal {manifest.seal}", *_spec_lines(manifest.experiment)]
    return {"text": "\n".join(lines), **found.to_json()}, 0


def _spec_lines(value: Any, path: str = "experiment") -> list[str]:
    if isinstance(value, dict):
        inner = [line for name, item in value.items() if name != "type" for line in _spec_lines(item, f"{path}.{name}")]
        return [f"  {path}: {value.get('type', '').rpartition('.')[2]}", *inner]
    if isinstance(value, list):
        return [line for index, item in enumerate(value) for line in _spec_lines(item, f"{path}.{index}")]
    return [f"  {path} = {value!r}"]


def _compared(difference: Any) -> tuple[dict[str, Any], int]:
    lines = [f"experiment.{field}" for field in difference.experiment]
    lines += [f"{part}.{leaf}" for part, leaves in difference.leaves.items() for leaf in leaves]
    result = {
        "text": "\n".join(lines) or "the same: no field and no bit of any leaf differs",
        "is_same": difference.is_same,
        "experiment": [asdict(field) for field in difference.experiment],
        "leaves": {part: [asdict(leaf) for leaf in leaves] for part, leaves in difference.leaves.items()},
    }
    return result, 0 if difference.is_same else 1
