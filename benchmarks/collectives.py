"""What the devices of a mesh send to each other in a step: read from the compiled program's text, and at the least.

Read by `benchmarks/scale_step.py`. Bytes are those that one device sends, when each collective goes round a ring (Patarasuk
and Yuan 2009): of a result of S bytes on n devices, all-gather and reduce-scatter send (n - 1) / n S, all-reduce twice that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxml.models.cost import num_parameters
from jaxml.models.spec import DecoderSpec

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FLOAT32_BYTES = 4
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^(?:ROOT )?%?[\w.\-]+ = (?P<shape>\(.*?\)|\S+) (?P<name>[\w\-]+)\(")
ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Moved:
    """How often a kind of collective runs in a step, and the bytes that one device sends for it."""

    count: int
    num_bytes: float


def moved(text: str) -> dict[str, Moved]:
    """By kind, what a compiled program (`Compiled.as_text()`) sends; loops count as often as they turn.

    Raises ValueError for a collective inside a loop whose number of turns the compiler does not tell.
    """
    bodies, entry = _computations(text)
    totals: dict[str, Moved] = {}

    def visit(name: str, times: int | None) -> None:
        for line in bodies.get(name, ()):
            found = INSTRUCTION.match(line)
            kind = None if found is None else found["name"].removesuffix("-start")
            if found is not None and kind in KINDS:
                if times is None:
                    raise ValueError(f"a collective in a loop of unknown length: {line[:200]}")
                old = totals.get(kind, Moved(0, 0.0))
                totals[kind] = Moved(old.count + times, old.num_bytes + times * sent_bytes(line, found["shape"], kind))
            inner = times
            if found is not None and found["name"] == "while":
                trips = TRIPS.search(line)
                inner = None if trips is None or times is None else times * int(trips[1])
            for called in _called(line):
                visit(called, inner)

    visit(entry, 1)
    return totals


def sent_bytes(line: str, shape: str, kind: str) -> float:
    """The bytes that one device sends for one collective."""
    arrays = [_array_bytes(*array) for array in ARRAY.findall(shape)]
    if "-start(" in line and shape.startswith("("):
        # Operands come first, then results of the same number; a permute adds numbers that nobody sends.
        half = 1 if kind == "collective-permute" else len(arrays) // 2
        arrays = arrays[half : 2 * half] if kind != "all-reduce" else arrays
    result, size = float(sum(arrays)), group_size(line)
    if kind == "collective-permute":
        return result
    if kind == "reduce-scatter":
        return result * (size - 1)  # its result is what one device keeps
    return result * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def group_size(line: str) -> int:
    """Devices in each group of a collective, in any of the forms that XLA prints.

    >>> group_size("replica_groups={{0,1},{2,3}}"), group_size("replica_groups=[2,4]<=[8]"), group_size("channel_id=1")
    (2, 4, 1)
    >>> group_size("replica_groups=mesh['a'=2,'b'=4] {'b'}, x")
    4
    """
    if told := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(told[1].split(","))
    if told := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(told[2])
    if told := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", told[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", told[2]))
    return 1


def smallest(spec: DecoderSpec, num_rows: int, mesh: Mapping[str, int]) -> float:
    """The bytes that one device has to send in a float32 step, with one axis of the mesh larger than 1; 0 on one device.

    data: each gradient is reduced over all devices. fsdp: each weight is gathered once and its gradient scattered once.
    tensor: each branch of a layer sums its outputs going forward and its inputs' gradients going back, and so do the
    embedding and the head. context: keys and values are gathered, and their gradients scattered, in each layer; and the
    weights' gradients are reduced as for data.
    """
    axes = [(name, size) for name, size in mesh.items() if size > 1]
    if not axes:
        return 0.0
    if len(axes) > 1:
        raise ValueError(f"one axis at a time, not {mesh}")
    (name, size), attention = axes[0], spec.blocks[0].attention
    share = (size - 1) / size * FLOAT32_BYTES
    num_tokens = num_rows * spec.context_length
    weights = num_parameters(spec)
    keys_and_values = 2 * num_tokens * attention.num_kv_heads * attention.head_width
    return {
        "data": 2 * share * weights,
        "fsdp": 2 * share * weights,
        "tensor": 2 * share * (4 * spec.num_layers + 2) * num_tokens * spec.width,
        "context": 2 * share * spec.num_layers * keys_and_values + 2 * share * weights,
    }[name]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(the instructions of each computation, the name of the entry)."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in map(str.strip, text.splitlines()):
        begun = COMPUTATION.match(line) if " = " not in line.partition("(")[0] else None
        if begun is not None:
            current = begun[2]
            bodies[current] = []
            entry = current if begun[1] else entry
        elif current and line != "}":
            bodies[current].append(line)
    return bodies, entry


def _called(line: str) -> Iterator[str]:
    yield from CALLED.findall(line)
    for names in BRANCHES.findall(line):
        yield from re.findall(r"%?([\w.\-]+)", names)


def _array_bytes(kind: str, dimensions: str) -> float:
    bits = {"pred": 8}.get(kind) or int(re.search(r"\d+", kind)[0])  # type: ignore[index]
    return bits / 8 * math.prod(int(size) for size in dimensions.split(",") if size)
