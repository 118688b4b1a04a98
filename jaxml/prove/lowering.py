"""Claim 7: each function is lowered once, and the compiled steps never wait for the host.

Reads the programs that `prove.subject` built for the other claims; `prove.prove` runs it after them.
"""

from __future__ import annotations

import re

from jaxml.prove.claims import Claim, exact
from jaxml.prove.subject import Subject
from jaxml.train.lowered import LoweredOnce

GROUP = "lowered once, nothing on the host"
# What a compiled module (HLO text) has where a step calls the host, waits for it, or keeps an array in its memory (S(5)
# is the host's memory space).
FORBIDDEN = {
    "a callback": re.compile(r'custom_call_target="[^"]*callback[^"]*"'),
    "an infeed": re.compile(r"\binfeed\("),
    "an outfeed": re.compile(r"\boutfeed\("),
    "a send to the host": re.compile(r"is_host_transfer=true"),
    "host memory": re.compile(r"\{[^{}\n]*S\(5\)[^{}\n]*\}"),
}


def lowered(subject: Subject) -> Claim:
    """The experiment's own train step, taken twice, and every function that the other claims ran: the number of lowerings,
    and what the compiled text has."""
    program = subject.assembly(subject.experiment.mesh).program
    state = program.init(subject.experiment.train.seed)
    for number in range(2):
        state, _ = program.train_step(state, subject.batch(number))
    faults, num_functions = [], 0
    for name, program in subject.programs:
        for function in (program.train_step, program.eval_step):
            if function.compiled is not None:
                num_functions += 1
                faults += [f"{function.name} on {name}: {fault}" for fault in faults_of(function)]
    return exact(GROUP, "compiled steps", faults, f"{num_functions} compiled functions")


def faults_of(function: LoweredOnce) -> list[str]:
    """What is wrong with one compiled function."""
    faults = [] if function.num_lowered == 1 else [f"lowered {function.num_lowered} times"]
    text = function.compiled.as_text()
    return faults + [f"has {what}" for what, pattern in FORBIDDEN.items() if pattern.search(text)]
