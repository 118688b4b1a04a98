"""What the environment says: our variables, and those of Slurm, Open MPI and Kubernetes as `jax.distributed` reads them."""

from __future__ import annotations

from typing import Any

import pytest
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from jaxml.devices.membership import Membership
from jaxml.errors import ConfigError
from jaxml.launch.cluster import own_membership, scheduled_membership

OURS = {"JAXML_COORDINATOR": "node0:4242", "JAXML_NUM_PROCESSES": "3", "JAXML_PROCESS_ID": "2"}


def slurm(nodes: str, job: str = "123456") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    }


def open_mpi(uri: str) -> dict[str, str]:
    return {"OMPI_MCA_orte_hnp_uri": uri, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "reference", "coordinator"),
    [
        (slurm("node001"), SlurmCluster, "node001:62016"),
        (slurm("node001,other7"), SlurmCluster, "node001:62016"),
        (slurm("node[001-015],other"), SlurmCluster, "node001:62016"),
        (slurm("a-b[07,9-12]", job="1"), SlurmCluster, "a-b07:61441"),
        (slurm("node1") | {"JAX_COORDINATOR_PORT": "7777"}, SlurmCluster, "node1:7777"),
        (open_mpi("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"), OmpiCluster, "10.96.0.1:62624"),
        (open_mpi("1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"), OmpiCluster, "fe80::b9b:ac5d:62880"),
    ],
)
def test_a_scheduler_is_read_as_jax_reads_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reference: Any, coordinator: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert reference.is_env_present()
    found = scheduled_membership(environment)
    port = environment.get("JAX_COORDINATOR_PORT")
    expected = reference.get_coordinator_address(timeout_secs=None, override_coordinator_port=port)
    assert found.coordinator == expected == coordinator
    assert (found.num_processes, found.process_id) == (reference.get_process_count(), reference.get_process_id())
    assert found.detection is None  # jax may still choose the accelerators of this task


def test_kubernetes_gives_the_index_and_jax_asks_the_cluster_for_the_rest() -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
    assert scheduled_membership(environment) == Membership(None, None, 3, "Kubernetes")
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX") as caught:
        scheduled_membership({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "Indexed" in str(caught.value)


def test_without_a_scheduler_every_missing_variable_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        scheduled_membership({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"})
    told = str(caught.value)
    assert "Slurm: without SLURM_STEP_NODELIST, SLURM_PROCID, SLURM_LOCALID" in told
    assert "OMPI_COMM_WORLD_RANK" in told and "KUBERNETES_SERVICE_HOST" in told


@pytest.mark.parametrize(("name", "value"), [("SLURM_PROCID", "x"), ("SLURM_JOB_ID", ""), ("SLURM_NTASKS", "-1")])
def test_a_scheduler_that_says_no_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        scheduled_membership(slurm("node1") | {name: value})


def test_an_address_of_mpirun_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="OMPI_MCA_orte_hnp_uri"):
        scheduled_membership(open_mpi("nothing"))


def test_our_variables_say_all_and_leave_nothing_to_detect() -> None:
    assert own_membership({}) is None
    assert own_membership(OURS) == Membership("node0:4242", 3, 2, "JAXML_COORDINATOR", None, detection="deactivate")
    found = own_membership(OURS | {"JAXML_CPU_DEVICES": "4"})
    assert found is not None and found.cpu_devices == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"JAXML_NUM_PROCESSES": "many"}, ["JAXML_NUM_PROCESSES"]),
        ({"JAXML_PROCESS_ID": "3"}, ["JAXML_PROCESS_ID"]),
        ({"JAXML_COORDINATOR": "node0"}, ["JAXML_COORDINATOR"]),
        ({"JAXML_CPU_DEVICES": "0"}, ["JAXML_CPU_DEVICES"]),
        ({"JAXML_NUM_PROCESSES": "0", "JAXML_COORDINATOR": ""}, ["JAXML_NUM_PROCESSES", "JAXML_COORDINATOR"]),
    ],
)
def test_every_variable_of_ours_that_is_wrong_is_named(change: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        own_membership(OURS | change)
    assert [fault.failed.split()[-1] for fault in caught.value.faults] == named


@pytest.mark.parametrize("missing", sorted(OURS))
def test_half_of_our_variables_are_not_enough(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        own_membership({name: value for name, value in OURS.items() if name != missing})
