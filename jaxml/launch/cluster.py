"""What the environment says about the processes of a run: our launcher's variables, Slurm, Open MPI, Kubernetes.

Reads `devices.membership` and `errors`; `cli` gives it the environment. No jax. The rules for Slurm and Open MPI are those
of `jax.distributed` (jax/_src/clusters), written down here so that an error can name the coordinator; a test
holds them equal. Kubernetes does not put the coordinator into the environment: jax asks the cluster for it
(with the package `kubernetes`), unless `JAXML_COORDINATOR` says it. Not run on a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxml.devices.membership import Membership
from jaxml.errors import ConfigError, Faults

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "JAXML_COORDINATOR", "JAXML_NUM_PROCESSES", "JAXML_PROCESS_ID"
CPU_DEVICES = "JAXML_CPU_DEVICES"
OWN = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
KUBERNETES = ("KUBERNETES_SERVICE_HOST",)
# jax takes one of these ports, by the number of the job.
NUM_PORTS = 2**12
FIRST_PORT = 65535 - NUM_PORTS + 1


def own_membership(environment: Mapping[str, str]) -> Membership | None:
    """Who this process is by the variables of `jaxml launch`, which anybody may set; None without them.

    Raises ConfigError, with every fault, where some are missing or are no numbers.
    """
    if not any(name in environment for name in OWN):
        return None
    faults = Faults(ConfigError)

    def number(name: str, least: int) -> int:
        text = environment.get(name, "")
        if not text.isdecimal() or int(text) < least:
            faults.add(
                f"the environment variable {name}", expected=f"a whole number, {least} or more",
                got=repr(text) if name in environment else "not set",
                todo=f"set all of {', '.join(OWN)}, or none; `jaxml launch local` sets them",
            )  # fmt: skip
            return least
        return int(text)

    count, index = number(NUM_PROCESSES, 1), number(PROCESS_ID, 0)
    coordinator = environment.get(COORDINATOR, "")
    if not re.fullmatch(r".+:\d+", coordinator):
        faults.add(
            f"the environment variable {COORDINATOR}", expected="host:port of process 0", got=repr(coordinator),
            todo=f"set all of {', '.join(OWN)}, or none; `jaxml launch local` sets them",
        )  # fmt: skip
    if not faults.found and index >= count:
        faults.add(
            f"the environment variable {PROCESS_ID}", expected=f"less than {NUM_PROCESSES} = {count}", got=str(index),
            todo="number the processes from 0",
        )  # fmt: skip
    devices = number(CPU_DEVICES, 1) if CPU_DEVICES in environment else None
    faults.raise_if_any()
    return Membership(coordinator, count, index, "JAXML_COORDINATOR", devices, detection="deactivate")


def scheduled_membership(environment: Mapping[str, str]) -> Membership:
    """Who this process is by what its scheduler says, where the user asked for it (`--distributed`).

    Raises ConfigError when no scheduler that is known here, or one that says half of it, started this process.
    """
    for names, read in ((SLURM, _slurm), (OPEN_MPI, _open_mpi), (KUBERNETES, _kubernetes)):
        if all(name in environment for name in names):
            return read(environment)
    known = {"Slurm": SLURM, "Open MPI": OPEN_MPI, "Kubernetes": KUBERNETES}
    raise ConfigError(
        "--distributed",
        expected="a process that Slurm, Open MPI or Kubernetes started",
        got="; ".join(
            f"{name}: without {', '.join(n for n in names if n not in environment)}" for name, names in known.items()
        ),
        todo=f"start it with srun, mpirun or as an indexed job, or set {', '.join(OWN)}, or leave --distributed out",
    )


def _slurm(environment: Mapping[str, str]) -> Membership:
    """The first node of the step listens: `node[007-015],other` begins with node007."""
    job, nodes, count, index, _ = (environment[name] for name in SLURM)
    prefix, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", nodes).groups()  # type: ignore[union-attr]
    node = prefix + (re.split("[,-]", rest)[0].rstrip("]") if bracket else "")
    port = environment.get("JAX_COORDINATOR_PORT") or str(_number("SLURM_JOB_ID", job) % NUM_PORTS + FIRST_PORT)
    return Membership(f"{node}:{port}", _number("SLURM_NTASKS", count), _number("SLURM_PROCID", index), "Slurm")


def _open_mpi(environment: Mapping[str, str]) -> Membership:
    """mpirun's own address, `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911` or `...;tcp6://[fe80::1]:43370`."""
    uri, count, index = (environment[name] for name in OPEN_MPI)
    found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    job = re.match(r"\d+", uri)
    if found is None or job is None:
        raise ConfigError(
            OPEN_MPI[0], expected="mpirun's address, like 1531576320.0;tcp://10.96.0.1:34911", got=uri,
            todo=f"set {', '.join(OWN)} instead",
        )  # fmt: skip
    host = found.group(1) or found.group(2)
    port = environment.get("JAX_COORDINATOR_PORT") or str(int(job.group()) // 2**12 % NUM_PORTS + FIRST_PORT)
    return Membership(f"{host}:{port}", _number(OPEN_MPI[1], count), _number(OPEN_MPI[2], index), "Open MPI")


def _kubernetes(environment: Mapping[str, str]) -> Membership:
    """An indexed job: its index is the number of the process."""
    return Membership(
        None, None, _number("JOB_COMPLETION_INDEX", environment.get("JOB_COMPLETION_INDEX", "")), "Kubernetes"
    )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name}", expected="a whole number", got=repr(text) if text else "not set",
            todo="start the process through its scheduler; a Kubernetes job needs `completionMode: Indexed`",
        )  # fmt: skip
    return int(text)
