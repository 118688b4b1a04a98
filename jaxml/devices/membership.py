"""Which of a run's processes this one is, as data. Reads no other jaxml file; no jax.

`launch.cluster` finds it in what a launcher or a scheduler says, `devices.start.join` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass

JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Membership:
    """Who this process is among those that compute one run together.

    coordinator: `host:port` where process 0 listens. None: `jax.distributed` has to find it out, and the two numbers.
    num_processes, process_id: how many there are, and which one this is, from 0.
    cpu_devices: how many devices this process makes of its CPU; None: the devices that it finds.
    told_by: who said so, for errors.
    join_timeout_s: how long the processes wait for each other at the start.
    detection: jax.distributed's `cluster_detection_method`: "deactivate", or None where the scheduler may also say which
        accelerators of the machine are this process's.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    told_by: str
    cpu_devices: int | None = None
    join_timeout_s: float = JOIN_TIMEOUT_S
    detection: str | None = None
