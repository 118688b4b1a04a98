"""Measures one training step of a small model on a mesh of fake CPU devices; prints one JSON object.

`benchmarks/scale_rows.py` starts it as a process of its own, because the number of devices is fixed once JAX has started.

    python benchmarks/scale_step.py --mesh fsdp=4 --time-steps 10
    python benchmarks/scale_step.py --layers 16 --execution scanned          # the seconds of compiling alone
    python benchmarks/scale_step.py --against digests --time-steps 10        # two programs in turns
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.collectives import moved, smallest
from benchmarks.jaxml_steps import batches
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.devices.start import tune_allocator
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, ExecutionSpec, MlpSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import OptimizerSpec, TrainSpec
from jaxml.train.step import Program, build_program

VOCABULARY, HEADS = 256, 4


def model(layers: int, width: int, context: int) -> DecoderSpec:
    """A Llama-like decoder whose every dimension four devices divide."""
    attention = AttentionSpec(HEADS, HEADS, width // HEADS, rope=RopeSpec())
    return DecoderSpec(
        vocab_size=VOCABULARY,
        context_length=context,
        width=width,
        num_layers=layers,
        blocks=(BlockSpec(attention, MlpSpec(width=3 * width)),),
    )


def program(args: argparse.Namespace, mesh: Mapping[str, int], compute: str, digests: bool) -> Program:
    """The step that `jaxml train` would run."""
    return build_program(
        model(args.layers, args.width, args.context),
        LanguageModeling(),
        OptimizerSpec(),
        TrainSpec(steps=1000, batch_size=args.batch, digests=digests),
        build_mesh(MeshSpec(**{"data": 1, **mesh})),
        PrecisionSpec(compute=compute),  # type: ignore[arg-type]
        ExecutionSpec(layers=args.execution),
    )


class Timed:
    """One program with its state; `step` takes an update and returns the seconds until its loss is on the host."""

    def __init__(self, built: Program, args: argparse.Namespace):
        self.program = built
        self.source = batches(model(args.layers, args.width, args.context), args.batch)
        self.state: Any = built.init(0)

    def step(self) -> float:
        columns = next(self.source)
        begun = time.perf_counter()
        self.state, metrics = self.program.train_step(self.state, columns)
        np.asarray(metrics["loss"])
        return time.perf_counter() - begun


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of compiling; with `--time-steps` those of a step, and what its collectives move."""
    mesh = dict(args.mesh)
    first = program(args, mesh, args.compute, digests=False)
    spec = model(args.layers, args.width, args.context)
    told: dict[str, Any] = {"jax": jax.__version__, "compile_s": first.compile(next(batches(spec, args.batch)))}
    sizes = moved(first.train_step.compiled.as_text())
    told["moved_bytes"] = {kind: size.num_bytes for kind, size in sizes.items()}
    told["num_collectives"] = {kind: size.count for kind, size in sizes.items()}
    told["smallest_bytes"] = smallest(spec, args.batch, mesh)
    if args.time_steps == 0:
        return told
    rivals = {"": Timed(first, args)}
    if args.against == "digests":
        rivals["against_"] = Timed(program(args, mesh, args.compute, digests=True), args)
    elif args.against:
        rivals["against_"] = Timed(program(args, mesh, args.against, digests=False), args)
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(args.time_steps + args.warm_up):
        for name in rivals if turn % 2 == 0 else reversed(rivals):
            seconds[name].append(rivals[name].step())
    counted = {name: values[args.warm_up :] for name, values in seconds.items()}
    told |= {f"{name}step_s": statistics.median(values) for name, values in counted.items()}
    if len(rivals) > 1:
        pairs = zip(counted["against_"], counted[""], strict=True)
        told["ratio"] = statistics.median(other / own for other, own in pairs)
    return told


def axis(word: str) -> tuple[str, int]:
    """`fsdp=4`"""
    name, _, size = word.partition("=")
    if name not in {field.name for field in dataclasses.fields(MeshSpec)}:
        raise argparse.ArgumentTypeError(f"{name!r} is no axis of the mesh")
    return name, int(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="*", type=axis, default=[], help="axes and their sizes, such as data=2 fsdp=2")
    parser.add_argument("--time-steps", type=int, metavar="N", default=0)
    parser.add_argument("--warm-up", type=int, metavar="N", default=3, help="updates before those that count")
    parser.add_argument("--execution", choices=["unrolled", "scanned"], default="scanned")
    parser.add_argument("--compute", default="float32", help="dtype of products")
    parser.add_argument("--against", default="", help="`digests` or another dtype: a second program that takes turns")
    for name, default in (("layers", 4), ("width", 128), ("context", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", math.prod(size for _, size in args.mesh))
    tune_allocator()
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
