"""The processes of a run: how launchers describe them, and their messages, with threads in place of processes."""

import concurrent.futures
import errno
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Store
from jax._src import clusters

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import ConfigError, Problem, default_config
from jaxtrain.runtime import distributed, progress, service
from jaxtrain.runtime.agreement import refusal
from jaxtrain.runtime.cluster import all_devices, node_names
from jaxtrain.runtime.distributed import Cluster, ClusterError, PeerLost, Peers, detect
from jaxtrain.runtime.shared import find_unshared
from jaxtrain.train import run as train

Detected = tuple[Any, ...]
LONG_S = 120  # no wait takes so long, unless it fails

TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}
TORCHRUN_8 = TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_JOB_ID": "4100", "SLURM_STEP_NODELIST": "gpu[01-03,07],login1", "SLURM_STEP_TASKS_PER_NODE": "1(x5)"}
SLURM |= {"SLURM_NTASKS": "5", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
SLURM_8 = SLURM | {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_LOCALID": "1"}
MPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in {"SIZE": "4", "RANK": "1", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}.items()}
MPI_2 = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
JAX = {"JAX_COORDINATOR_ADDRESS": "head:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
ORTE = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OURS = {"JAXTRAIN_COORDINATOR": "head:1234", "JAXTRAIN_NUM_PROCESSES": "2", "JAXTRAIN_PROCESS_ID": "1"}
HEAD = {"JAXTRAIN_COORDINATOR": "head:1234"}


def without(environ: dict[str, str], part: str) -> dict[str, str]:
    return {name: text for name, text in environ.items() if part not in name}


NO_MASTER = without(TORCHRUN, "MASTER")
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1"}
GIVEN = {"coordinator": "[::1]:99", "num-processes": "2", "process-id": "0", "local-devices": "0, 1"}

# options, environment, and the cluster: coordinator, number of processes, id, devices, source ("": no cluster)
FOUND: list[tuple[dict[str, str], dict[str, str], str]] = [
    (dict.fromkeys(distributed.FIELDS, ""), {}, ""),
    (GIVEN, OURS | SLURM, "[::1]:99 2 0 (0, 1) --coordinator"),
    ({}, OURS, "head:1234 2 1 None JAXTRAIN_COORDINATOR"),
    ({"num-processes": "1"}, SLURM, ""),
    ({}, TORCHRUN, "node1:29500 4 3 None torchrun"),
    ({}, TORCHRUN_8, "node1:29500 4 3 (1,) torchrun"),
    ({}, TORCHRUN_8 | {"LOCAL_WORLD_SIZE": "1"}, "node1:29500 4 3 None torchrun"),
    ({}, TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "node1:29501 4 3 None torchrun"),  # torchrun listens itself
    ({"local-devices": "4,5"}, TORCHRUN_8, "node1:29500 4 3 (4, 5) torchrun"),
    ({}, NO_MASTER | HEAD, "head:1234 4 3 None torchrun and JAXTRAIN_COORDINATOR"),
    ({}, SLURM, "gpu01:61444 5 2 None Slurm"),
    ({}, SLURM_8, "a:61444 5 2 (1,) Slurm"),
    ({}, SLURM | {"SLURM_STEP_NODELIST": "?"} | HEAD, "head:1234 5 2 None Slurm and JAXTRAIN_COORDINATOR"),
    ({}, SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "1", "WORLD_SIZE": "5"}, "gpu01:61444 5 2 None Slurm"),
    ({}, SLURM | {"PMI_SIZE": "5", "PMI_RANK": "2", "PMIX_RANK": "2"}, "gpu01:61444 5 2 None Slurm"),
    ({}, MPI | HEAD, "head:1234 4 1 None Open MPI and JAXTRAIN_COORDINATOR"),
    ({}, MPI_2 | HEAD, "head:1234 4 1 (1,) Open MPI and JAXTRAIN_COORDINATOR"),
    # JAX's variables
    ({}, JAX, "head:1234 2 1 None JAX_COORDINATOR_ADDRESS"),
    ({}, JAX | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, "head:1234 2 1 (2, 3) JAX_COORDINATOR_ADDRESS"),
    ({}, OURS | JAX | {"JAXTRAIN_PROCESS_ID": "0"}, "head:1234 2 0 None JAXTRAIN_COORDINATOR"),
    ({}, JAX | {"JAX_NUM_PROCESSES": "1"}, ""),
    ({}, SLURM | {"JAX_COORDINATOR_ADDRESS": "head:1"}, "head:1 5 2 None Slurm and JAX_COORDINATOR_ADDRESS"),
    ({}, TORCHRUN_8 | {"JAX_LOCAL_DEVICE_IDS": "4"}, "node1:29500 4 3 (4,) torchrun"),
    # One launcher starts another: the inner one's variables count. A count of nodes around it does not matter
    ({}, SLURM | TORCHRUN, "node1:29500 4 3 None torchrun"),
    ({}, SLURM | MPI | HEAD, "head:1234 4 1 None Open MPI and JAXTRAIN_COORDINATOR"),
    ({}, SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, "gpu01:61444 5 2 None Slurm"),  # left in a shell
    ({}, TORCHRUN_8 | {"PET_NNODES": "2", "SKYPILOT_NUM_NODES": "2"}, "node1:29500 4 3 (1,) torchrun"),
    ({}, OURS | PMI, "head:1234 2 1 None JAXTRAIN_COORDINATOR"),
    # One process, and variables that describe none
    ({}, without(SLURM, "STEP"), ""),  # outside srun
    ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}, ""),  # the shell of salloc
    ({}, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, ""),
    *(({}, {name: count}, "") for name, count in (("WORLD_SIZE", "1"), ("PMI_SIZE", "1"), ("PET_NNODES", "1:1"))),
    ({}, {"NNODES": "1", "NODE_RANK": "0"}, ""),
    ({}, {"NUM_PROCESSES": "4"}, ""),
    ({}, {"JOB_COMPLETION_INDEX": "1"}, ""),  # may be that of one of several runs
    ({"num-processes": "1"}, {"RANK": "1"} | PMI, ""),
    (GIVEN, {**SLURM, "NNODES": "9", **JAX}, "[::1]:99 2 0 (0, 1) --coordinator"),
    # IPv6
    *(
        ({}, TORCHRUN | {"MASTER_ADDR": host}, f"[{host.strip('[]')}]:29500 4 3 None torchrun")
        for host in ("fd00::1", "::1", "2001:db8:0:1::12", "fe80::1%eth0", "[fd00::1]")
    ),
]
UNREAD = ("WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_SIZE", "SKYPILOT_NUM_NODES")
UNREAD += ("HOROVOD_SIZE", "LWS_GROUP_SIZE", "AWS_BATCH_JOB_NUM_NODES", "NNODES", "PET_NNODES", "JAX_PROCESS_COUNT")

INDICES = ("RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "NODE_RANK", "OMPI_COMM_WORLD_RANK")

# options, environment, and the key of each problem, in order
WRONG: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"coordinator": "head:1"}, {}, "--num-processes --process-id"),
    *(({"coordinator": wrong}, OURS, "--coordinator") for wrong in ("head", "::1:99", "head:65536")),
    ({"num-processes": "two", "process-id": "-1"}, OURS, "--num-processes --process-id"),
    ({"process-id": "2"}, OURS, "JAXTRAIN_COORDINATOR and JAXTRAIN_NUM_PROCESSES and --process-id"),
    ({"local-devices": "0,0"}, OURS, "--local-devices"),
    ({"local-devices": "0"}, {}, "--local-devices"),
    (dict.fromkeys(GIVEN, "x"), {}, "--coordinator --num-processes --process-id --local-devices"),
    ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR MASTER_PORT"),
    ({}, TORCHRUN | {"RANK": "a", "MASTER_PORT": "0"}, "RANK MASTER_PORT"),
    ({}, TORCHRUN | {"RANK": "4"}, "torchrun"),
    ({}, TORCHRUN_8 | {"LOCAL_RANK": "2"}, "LOCAL_RANK"),
    ({}, without(SLURM, "PROCID"), "SLURM_PROCID"),
    ({}, without(SLURM_8, "LOCALID"), "SLURM_LOCALID"),
    ({}, without(SLURM, "TASKS_PER"), "SLURM_STEP_TASKS_PER_NODE"),
    ({}, SLURM | {"SLURM_STEP_NODELIST": "gpu[01-"}, "SLURM_STEP_NODELIST"),
    ({}, SLURM | {"SLURM_JOB_ID": "4_1"}, "SLURM_JOB_ID"),
    ({}, SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS"),
    ({}, MPI, "--coordinator"),
    ({}, without(MPI, "WORLD_RANK") | HEAD, "OMPI_COMM_WORLD_RANK"),
    ({}, {"JAX_COORDINATOR_ADDRESS": "head:1"}, "--num-processes --process-id"),
    ({}, {"JAX_COORDINATOR_ADDRESS": "head"}, "JAX_COORDINATOR_ADDRESS"),
    ({}, without(JAX, "ADDRESS"), "--coordinator"),
    ({}, without(JAX, "NUM"), "--num-processes"),
    ({}, {"JAX_LOCAL_DEVICE_IDS": "0"}, "JAX_LOCAL_DEVICE_IDS"),
    ({}, JAX | {"JAX_LOCAL_DEVICE_IDS": "a"}, "JAX_LOCAL_DEVICE_IDS"),
    *(({}, {**OURS, "JAXTRAIN_COORDINATOR": wrong}, "JAXTRAIN_COORDINATOR") for wrong in ("fd00::1:29500", "fd00::1", "[x]:1")),
    # Launchers that are not read: each process would train alone
    *(({}, {name: "2"}, name) for name in UNREAD),
    ({}, {"PET_NNODES": "1:2", "PET_NODE_RANK": "0"}, "PET_NNODES"),
    ({}, {"NUM_PROCESSES": "2", "PROCESS_ID": "1"}, "NUM_PROCESSES"),
    *(({}, {name: "0"}, name) for name in INDICES),
    ({}, {"PET_NNODES": "2", "PET_NODE_RANK": "1", "WORLD_SIZE": "16", "RANK": "1"}, "WORLD_SIZE"),  # Kubeflow
    ({}, SLURM | {"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE"),
    ({}, PMI | HEAD, "PMI_SIZE"),
    ({}, SLURM | PMI, "PMI_SIZE"),  # mpiexec within a job
    ({}, SLURM | {"SLURM_NTASKS": "1"} | PMI, "PMI_SIZE"),
]


@pytest.mark.parametrize(("options", "environ", "expected"), FOUND)
def test_a_launcher_is_recognised(options: dict[str, str], environ: dict[str, str], expected: str):
    found, problems = detect(options, environ)
    assert not problems
    fields = found and (found.coordinator, found.num_processes, found.process_id, found.local_device_ids, found.source)
    assert " ".join(map(str, fields or ())) == expected


@pytest.mark.parametrize(("options", "environ", "expected"), WRONG)
def test_mistakes_in_it_are_named_with_a_fix(options: dict[str, str], environ: dict[str, str], expected: str):
    found, problems = detect(options, environ)
    assert found is None and " ".join(problem.key for problem in problems) == expected
    assert all(problem.rule and problem.remedy for problem in problems)


@pytest.mark.parametrize(
    ("environ", "key"), [(TORCHRUN, "processes"), ({"RANK": "1"}, "RANK"), ({"JAX_PROCESS_ID": "1"}, "--")]
)
def test_a_python_program_under_a_launcher_is_refused(
    environ: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each of its processes would train alone. The fix trains in each on purpose."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        train.run(default_config(), tmp_path / "run")
    assert refusal.value.problems[0].key.startswith(key) and not (tmp_path / "run").exists()
    monkeypatch.setenv("JAXTRAIN_NUM_PROCESSES", "1")
    assert train.check_alone() == []


@pytest.mark.parametrize("environ", [PMI, {"PMIX_RANK": "1"}, {"PET_NNODES": "2"}])
def test_the_fix_for_a_launcher_that_is_not_read_works(environ: dict[str, str]):
    _, (problem,) = detect({}, environ)
    assert all(name in problem.remedy for name in (*OURS, "JAXTRAIN_LOCAL_DEVICES", "JAXTRAIN_NUM_PROCESSES=1"))
    assert detect({}, environ | OURS)[0] == Cluster("head:1234", 2, 1, None, "JAXTRAIN_COORDINATOR")
    assert detect({}, environ | {"JAXTRAIN_NUM_PROCESSES": "1"}) == (None, [])


# ---- JAX's own detection. Where it is right, ours is the same; each difference is a reason for ours


def jax_detects(method: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Detected:
    """Return (address, number of processes, index, devices) that JAX finds. method: its name of a launcher."""
    with monkeypatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR")):
                patch.delenv(name)
        for name, text in environ.items():
            patch.setenv(name, text)
        return clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, method, None)


def ours(environ: dict[str, str]) -> Detected:
    found, problems = detect({}, environ)
    assert found and not problems
    devices = found.local_device_ids
    return found.coordinator, found.num_processes, found.process_id, list(devices) if devices else None


@pytest.mark.parametrize("nodes", ["gpu[01-03,07],login1", "gpu[1,7-9]", "a,b", "node001", "n[098-101]"])
def test_slurm_as_jax_reads_it(nodes: str, monkeypatch: pytest.MonkeyPatch):
    """Several tasks on a node: address with the port of the job, count, index, and the device of the local rank."""
    for more in ({}, {"JAX_COORDINATOR_PORT": "77"}, {"SLURM_JOB_ID": "7340031"}):
        environ = SLURM_8 | {"SLURM_STEP_NODELIST": nodes} | more
        assert ours(environ) == jax_detects("slurm", environ, monkeypatch)


@pytest.mark.parametrize(
    ("nodes", "first", "of_jax"),
    [("node[001]", "node001", "node001]"), ("r[1-2]-ib", "r1-ib", "r1"), ("r[1-2]n[3-4]", "r1n3", "r1")],
)
def test_node_lists_that_jax_misreads(nodes: str, first: str, of_jax: str, monkeypatch: pytest.MonkeyPatch):
    environ = SLURM_8 | {"SLURM_STEP_NODELIST": nodes}
    assert ours(environ)[0] == f"{first}:61444" and jax_detects("slurm", environ, monkeypatch)[0] == f"{of_jax}:61444"


def test_a_process_alone_on_its_node_has_one_device_of_jax_and_all_of_ours(monkeypatch: pytest.MonkeyPatch):
    for method, environ in (("slurm", SLURM), ("ompi", MPI | ORTE)):
        assert jax_detects(method, environ, monkeypatch)[3] == [0] and ours(environ | HEAD)[3] is None


def test_a_step_of_one_task_in_a_larger_job_is_several_processes_to_jax(monkeypatch: pytest.MonkeyPatch):
    """It is the shell of salloc."""
    environ = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert detect({}, environ) == (None, []) and jax_detects("slurm", environ, monkeypatch)[1] == 5


def test_open_mpi_and_jax(monkeypatch: pytest.MonkeyPatch):
    """Count, index and device are equal. JAX's address is that of mpirun, which need not be on process 0's machine; we ask."""
    address, *others = jax_detects("ompi", MPI_2 | ORTE, monkeypatch)
    assert address.startswith("10.96.0.1:") and others == [4, 1, [1]]
    assert ours(MPI_2 | ORTE | HEAD) == ("head:1234", *others)
    (problem,) = detect({}, MPI_2 | ORTE)[1]
    assert problem.key == "--coordinator"
    with pytest.raises((RuntimeError, ImportError), match="mpi4py"):  # version 5, of which we need no package
        jax_detects("ompi", MPI_2, monkeypatch)
    assert ours(MPI_2 | HEAD) == ("head:1234", *others)


def test_jax_does_not_read_torchruns_variables(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))]:
            patch.delenv(name)
        for name, text in TORCHRUN_8.items():
            patch.setenv(name, text)
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, None)
    assert found == (None,) * 4 and ours(TORCHRUN_8) == ("node1:29500", 4, 3, [1])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,07],login1", "gpu01 gpu02 gpu03 gpu07 login1"),
        ("a1,b-2.x_y,n[8-11]", "a1 b-2.x_y n8 n9 n10 n11"),
        ("r[1-2]n[08,10]-ib", "r1n08-ib r1n10-ib r2n08-ib r2n10-ib"),
        ("n[098-0101]", "n098 n099 n100 n101"),
        *((text, "") for text in ("", "n[", "n]", "n[1-]", "n[a]", "a,,b", "n[[1]]", "a b")),
    ],
)
def test_slurms_node_lists_are_read(text: str, names: str):
    assert node_names(text) == names.split()


@pytest.mark.parametrize(
    ("kind", "ids", "count", "node"), [("gpu", None, 32, 8), ("gpu", (3,), 4, 1), ("gpu", (0, 1), 8, 2), ("cpu", (0, 1), 32, 8)]
)
def test_all_devices_of_a_run_are_those_of_all_its_processes(kind: str, ids: tuple[int, ...] | None, count: int, node: int):
    here = Devices(kind, "H200", 8, 140.0, "test")
    assert all_devices(here, None) == here
    found = all_devices(here, Cluster("head:1", 4, 0, ids, "the test"))
    assert (found.count, found.node) == (count, node)


def view(count: int, *problems: str, kind: str = "gpu") -> dict[str, Any]:
    return {
        "who": "host h",
        "kind": kind,
        "count": count,
        "source": "the test",
        "problems": [(each, "Mend it.") for each in problems],
    }


def test_a_refusal_reaches_all_processes():
    """Different devices are the only problem. A process without a problem names one that has some."""
    own = [Problem("a", 1, "b", "c")]
    assert refusal([view(4)] * 3, []) == []
    (problem,) = refusal([view(2), view(4, "x"), view(2)], own)
    assert problem.key == "devices" and "processes 0 and 2" in problem.rule and "process 1" in problem.rule
    assert "2 GPUs" in problem.rule and "4 GPUs" in problem.rule and "CUDA_VISIBLE_DEVICES" in problem.remedy
    (problem,) = refusal([view(8), view(1, kind="cpu")], [])
    assert problem.key == "devices" and "JAX_PLATFORMS=cpu" in problem.remedy
    (problem,) = refusal([view(2, kind="cpu"), view(6, kind="cpu")], [])
    assert "JAX_NUM_CPU_DEVICES=2" in problem.remedy
    assert refusal([view(4, "x"), view(4)], own) == own
    (problem,) = refusal([view(4), view(0, "devices: no GPU", "y")], [])  # it has no devices, and says why
    assert problem.key == "process 1 (host h)" and "devices: no GPU" in problem.rule
    assert "1 more" in problem.rule and problem.remedy == "Mend it."


# ---- Messages between processes


Connect = Callable[[Store, int], list[Peers]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that makes the peers of a store. Their threads end with the test."""
    made: list[Peers] = []

    def peers(store: Store, count: int) -> list[Peers]:
        for i in range(count):
            store.key_value_set(f"jaxtrain/who/{i}", f"host h{i}, pid {i}")
        made.extend(one := [Peers(i, count, store) for i in range(count)])
        return one

    yield peers
    for one in made:
        one._ending.set()


def test_one_process_waits_for_nothing():
    peers = Peers(0, 1)
    assert peers.gather("a", "x", 0) == ["x"]
    peers.watch(lambda message: pytest.fail(message))
    assert all(peers.may_start(step) for step in range(1, 5)) and peers.stop_reason is None
    peers.ask_to_stop("SIGTERM")
    peers.ask_to_stop("once more")
    assert peers.may_start(4) and not peers.may_start(5)
    assert peers.stop_reason == "SIGTERM"
    peers.close()
    peers.close()


def await_steps(store: Store, count: int) -> None:
    """Wait until all processes have published the step that they have reached."""
    for i in range(count):
        store.blocking_key_value_get(f"jaxtrain/reached/{i}", 1000 * LONG_S)


def test_all_stop_at_the_furthest_step(connect: Connect):
    store = Store()
    peers = connect(store, 3)
    for i, reached in enumerate((3, 7, 0)):  # process 2 has not started a step
        assert all(peers[i].may_start(step) for step in range(1, reached + 1))
    peers[2].ask_to_stop("SIGTERM")
    peers[0].ask_to_stop("too late")
    await_steps(store, 3)  # until all have published, processes may continue
    for one in peers:
        assert one.may_start(7) and not one.may_start(8) and not one.may_start(9)
        assert one.stop_reason == "SIGTERM"


def test_back_at_an_earlier_step_the_agreed_one_is_not_waited_for(connect: Connect):
    """After a rollback, `stop_here` stops every process at once, even one that has not read the request."""
    store = Store()
    peers = connect(store, 2)
    assert all(one.may_start(step) for one in peers for step in (1, 2, 3))
    peers[0].ask_to_stop("SIGTERM")
    await_steps(store, 2)
    for one in peers:
        one.stop_here("SIGTERM")
        assert not one.may_start(2) and one.stop_reason == "SIGTERM"


def test_a_request_to_stop_reaches_a_process_that_listens_later(connect: Connect):
    store, heard = Store(), queue.Queue[str]()
    peers = connect(store, 2)
    peers[0].listen(heard.put)
    peers[1].ask_to_stop("SIGTERM")
    assert heard.get(timeout=LONG_S) == "SIGTERM"
    await_steps(store, 2)
    peers[1].listen(heard.put)
    assert heard.get(timeout=LONG_S) == "SIGTERM" and heard.empty()


def test_a_second_close_waits_for_the_first(connect: Connect):
    """If the second call returned first, its caller would end the process while the first call waits in the barrier."""
    in_barrier, both = threading.Event(), threading.Barrier(2)

    class Waiting(Store):
        def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
            in_barrier.set()
            both.wait(LONG_S)

    peers = connect(Waiting(), 2)
    first, second = (threading.Thread(target=peers[1].close, daemon=True) for _ in range(2))
    first.start()
    assert in_barrier.wait(LONG_S)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    both.wait(LONG_S)
    for thread in (first, second):
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_process_that_does_not_publish_its_step_is_named():
    store = Store(never=("jaxtrain/reached/1",))
    store.values = {"jaxtrain/who/0": "host here, pid 6", "jaxtrain/who/1": "host there, pid 7"}
    peers = Peers(0, 2, store)
    assert peers.may_start(1)
    peers.ask_to_stop("SIGTERM")
    store.blocking_key_value_get("jaxtrain/reached/0", 1000 * LONG_S)
    assert peers.may_start(1)
    with pytest.raises(PeerLost, match=r"^process 1 \(host there, pid 7\)"):
        peers.may_start(2)
    peers._ending.set()


def test_gathers_leave_little_behind_and_name_the_missing_process(connect: Connect):
    store = Store(never=("jaxtrain/gather/b/0/1",))
    peers = connect(store, 3)

    def talk(one: Peers) -> None:
        for number in range(20):
            assert one.gather("a", f"{one.process_index} {number}", 60) == [f"{i} {number}" for i in range(3)]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(talk, peers))
    assert len(store.key_value_dir_get("jaxtrain/gather")) <= 6
    store.key_value_set("jaxtrain/gather/b/0/2", "")
    with pytest.raises(PeerLost, match=r"^process 1 \(host h1, pid 1\) .* 7 s"):
        peers[0].gather("b", "", 7)


def shared(peers: list[Peers], folders: list[dict[str, Path]]) -> dict[str, str]:
    """Call find_unshared as each process, with the folders that this process sees. The result is the same on all."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda one, own: find_unshared(own, one, LONG_S), peers, folders)
    assert others == [first] * len(others)
    return first


def test_folders_that_are_not_shared_are_found(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The process that does not see a folder is named. Nothing is left behind, not even a folder."""
    monkeypatch.setattr("jaxtrain.runtime.shared.SEE_S", 0.5)
    peers, one, other = connect(Store(), 3), tmp_path / "runs" / "one", tmp_path / "other"
    assert shared(peers, [{"a": one, "b": one / "c"}] * 3) == {} and not list(tmp_path.iterdir())
    found = shared(peers, [{"a": one, "b": one}, {"a": one, "b": other}, {"a": one, "b": other}])
    assert list(found) == ["b"] and "process 1 (host h1, pid 1)" in found["b"] and "process 2" in found["b"]
    assert not list(tmp_path.iterdir())
    other.mkdir()
    (other / "file").write_text("")
    assert "process 2 (host" in shared(peers, [{"a": one}, {"a": one}, {"a": other}])["a"]
    assert [p.name for p in tmp_path.rglob("*")] == ["other", "file"]
    found = shared(peers, [{"a": other / "file"}] * 3)  # a folder that cannot be written to
    assert "process 0" in found["a"] and str(other / "file") in found["a"]
    assert find_unshared({"a": other / "file"}, Peers(0, 1), 0) == {}


def test_a_shared_folder_may_appear_late(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Network file systems show a new folder some seconds late."""
    late = threading.Event()

    def make(probe: Path) -> str:
        threading.Timer(0.5, lambda: (probe.mkdir(parents=True), late.set())).start()
        return ""

    monkeypatch.setattr("jaxtrain.runtime.shared._make_probe", make)
    assert shared(connect(Store(), 2), [{"a": tmp_path / "new"}] * 2) == {} and late.is_set()


# ---- A process that dies or fails. tests/campaign/test_peers.py uses real processes.


def soon(what: Callable[[], bool], limit_s: float = 10) -> bool:
    """Return whether `what()` becomes true."""
    deadline = time.monotonic() + limit_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


class Losses:
    """Collect the messages about lost processes, by process."""

    def __init__(self, peers: list[Peers]):
        self.queues = [queue.Queue[str]() for _ in peers]
        for one, messages in zip(peers, self.queues, strict=True):
            one.watch(messages.put)

    def of(self, index: int) -> str:
        return self.queues[index].get(timeout=LONG_S)

    def none(self, *indices: int) -> bool:
        return all(self.queues[i].empty() for i in indices)


def test_a_failed_collective_is_blamed_on_the_process_that_ended(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    """The service reports a dead process after HEARTBEAT_S. A process whose collective failed waits for this report."""
    asleep, awake = threading.Event(), threading.Event()

    class Sleeping(Clock):
        def sleep(self, seconds: float) -> None:
            if seconds > service.HEARTBEAT_S:
                asleep.set()
                awake.wait(LONG_S)

    monkeypatch.setattr("jaxtrain.runtime.peers.time", Sleeping())
    store = Store()
    peers = connect(store, 2)
    losses = Losses(peers)
    failure = "JaxRuntimeError: Gloo AllGather failed: Connection reset by peer"
    closing = threading.Thread(target=peers[1].close, args=(failure,), daemon=True)
    closing.start()
    assert asleep.wait(LONG_S) and losses.none(0, 1)
    store.key_value_set("jaxtrain/news/0", json.dumps(["failed", "process 0 is dead"]))
    assert losses.of(1) == "process 0 is dead"
    awake.set()
    closing.join(LONG_S)


def test_a_failure_is_reported_to_the_others_with_its_reason(connect: Connect):
    store = Store()
    peers = connect(store, 3)
    losses = Losses(peers)
    peers[1].close("OSError: no")
    peers[1].close()  # only the first call counts
    expected = "process 1 (host h1, pid 1) has failed: OSError: no"
    assert losses.of(0) == losses.of(2) == expected
    late: list[str] = []
    peers[2].watch(late.append)
    assert late == [expected] and losses.none(0, 1, 2)
    assert not any(one.refused for one in peers)


def test_a_refusal_after_the_start_is_told_apart_from_a_failure(connect: Connect):
    peers = connect(Store(), 2)
    losses = Losses(peers)
    peers[1].close("data.source: no such file", refused=True)
    assert "data.source: no such file" in losses.of(0) and peers[0].refused


def test_all_report_the_same_dead_process(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxtrain.runtime.peers.POLL_S", 0.01)
    store = Store()
    peers = connect(store, 3)
    losses = Losses(peers)
    store.live = {0, 2}
    for i, step in enumerate((13, 12, 13)):
        peers[i].publish(progress.record(step, "step", 0.0, None))
    for i in (0, 2):
        threading.Thread(target=peers[i]._watch_live, daemon=True).start()
    for i in (0, 2):
        message = losses.of(i)
        assert message.startswith("process 1 (host h1, pid 1) is dead")
        assert message.index("step 12") < message.index("processes 0 and 2") < message.index("step 13")


@pytest.mark.parametrize("aborting", [False, True])
def test_process_0_without_an_answer_is_reported(aborting: bool, monkeypatch: pytest.MonkeyPatch):
    """Process 0 is lost after one unanswered request if JAX is aborting this process, otherwise after five."""
    monkeypatch.setattr("jaxtrain.runtime.peers.is_aborting", lambda: aborting)
    store = Store(never=("jaxtrain/who/0",))
    assert Losses([Peers(1, 2, store)]).of(0).startswith("process 0 ")
    assert store.asked.count("jaxtrain/who/0") == (1 if aborting else 5)


def test_the_end_of_the_service_is_reported():
    store = Store()
    peers = Peers(1, 2, store)
    losses = Losses([peers])
    store.gone = True
    assert losses.of(0).startswith("process 0 ")
    peers.ask_to_stop("SIGTERM")  # the loss has been reported already
    with pytest.raises(PeerLost, match="^process 0 .*UNAVAILABLE"):
        peers.gather("a", "", 60)


def test_process_0_leaves_last(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxtrain.runtime.peers.HEARTBEAT_S", LONG_S)
    monkeypatch.setattr("jaxtrain.runtime.peers.LEAVE_S", 0.0)
    store = Store()
    peers = connect(store, 2)
    store.barrier = threading.Barrier(1)
    losses = Losses(peers)
    first = threading.Thread(target=peers[0].close, daemon=True)
    first.start()
    first.join(0.1)
    assert first.is_alive()  # it waits until all others have left
    peers[1].close()
    first.join(LONG_S)
    assert not first.is_alive() and losses.none(0, 1)
    peers[0].ask_to_stop("too late")
    assert peers[0].stop_reason is None


def test_a_hang_ends_all_processes_and_no_process_is_lost_then(connect: Connect):
    store = Store()
    peers = connect(store, 3)
    losses = Losses(peers)
    peers[2].tell_hang("why")
    for one in peers:
        assert soon(lambda one=one: one.hang == "why" and one._ending.is_set())
    store.gone = True
    assert losses.none(0, 1, 2)


def test_each_process_says_in_which_exchange_its_main_thread_waits(connect: Connect):
    peers, seen = connect(Store(), 2), []

    def answer() -> None:
        soon(lambda: peers[0].waits_at() is not None)
        seen.extend(one.waits_at() for one in peers)
        peers[1].gather("best", "", LONG_S)  # in a thread of its own, as a save's

    other = threading.Thread(target=answer, daemon=True)
    other.start()
    peers[0].gather("best", "", LONG_S)
    other.join(LONG_S)
    assert seen == ["best", None] and peers[0].waits_at() is None
    peers[1].publish("here")
    assert peers[0].read_progress() == {1: "here"} and peers[0].present() == [0, 1]
    peers[0]._set("left/1", "")
    assert peers[0].present() == [0]


# ---- The start


def test_a_port_in_use_is_refused_after_half_a_minute(monkeypatch: pytest.MonkeyPatch):
    """The service waits for 30 s before the refusal: an earlier attempt of the same job may still hold the port."""
    asked: list[int] = []

    def is_used(address: tuple[str, int], **_: object) -> None:
        asked.append(address[1])
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(service, "time", clock := Clock())
    monkeypatch.setattr(service.socket, "create_server", is_used)
    with pytest.raises(ClusterError, match="127.0.0.1:4100"):
        service._await_free_port(Cluster("127.0.0.1:4100", 2, 0, None, "the test"))
    assert 1030 <= clock.now <= 1031 and {*asked} == {4100}


@pytest.mark.parametrize(("blocked", "aborting"), [([signal.SIGABRT], True), (signal.valid_signals(), False)])
def test_an_abort_is_seen_in_the_mask_of_a_thread(blocked: Any, aborting: bool):
    both = threading.Barrier(2, timeout=LONG_S)

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        both.wait()
        both.wait()

    assert not service.is_aborting()
    thread = threading.Thread(target=block)
    thread.start()
    both.wait()
    assert service.is_aborting() == aborting
    both.wait()
    thread.join()
    assert not service.is_aborting()
