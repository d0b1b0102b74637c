"""The processes of a run: how launchers describe them, and their messages, with threads in place of processes."""

import concurrent.futures
import functools
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import Clock, Store

from jaxtrain import distributed
from jaxtrain.distributed import Cluster, ClusterError, PeerLost, Peers, detect, service, words
from jaxtrain.distributed.cluster import all_devices, node_names
from jaxtrain.hardware import Devices

TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}
TORCHRUN_8 = TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "gpu[01-03,07],login1",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
}
SLURM_8 = SLURM | {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_LOCALID": "2"}
MPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in {"SIZE": "4", "RANK": "1", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"}.items()}
MPI_2 = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
OURS = {"JAXTRAIN_COORDINATOR": "head:1234", "JAXTRAIN_NUM_PROCESSES": "2", "JAXTRAIN_PROCESS_ID": "1"}
HEAD = {"JAXTRAIN_COORDINATOR": "head:1234"}


def without(environ: dict[str, str], part: str) -> dict[str, str]:
    return {name: text for name, text in environ.items() if part not in name}


# name -> (options, environment, the fields of the detected Cluster)
FOUND: dict[str, tuple[dict[str, str], dict[str, str], tuple[Any, ...] | None]] = {
    "nothing": ({}, {}, None),
    "not given": (dict.fromkeys(distributed.FIELDS, ""), {}, None),
    "options": (
        {"coordinator": "[::1]:99", "num-processes": "2", "process-id": "0", "local-devices": "0, 1"},
        OURS | SLURM,
        ("[::1]:99", 2, 0, (0, 1), "--coordinator"),
    ),
    "variables": ({}, OURS, ("head:1234", 2, 1, None, "JAXTRAIN_COORDINATOR")),
    "an option over a variable": ({"process-id": "0"}, OURS, ("head:1234", 2, 0, None, "JAXTRAIN_COORDINATOR")),
    "one process": ({}, {"JAXTRAIN_NUM_PROCESSES": "1"}, None),
    "one process, whatever Slurm says": ({"num-processes": "1"}, SLURM, None),
    "torchrun": ({}, TORCHRUN, ("node1:29500", 4, 3, None, "torchrun")),
    "torchrun, several a node": ({}, TORCHRUN_8, ("node1:29500", 4, 3, (1,), "torchrun")),
    "torchrun, one a node": ({}, TORCHRUN_8 | {"LOCAL_WORLD_SIZE": "1"}, ("node1:29500", 4, 3, None, "torchrun")),
    "torchrun listens itself": (
        {},
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        ("node1:29501", 4, 3, None, "torchrun"),
    ),
    "torchrun under Slurm": ({}, SLURM | TORCHRUN, ("node1:29500", 4, 3, None, "torchrun")),
    "torchrun, one process": ({}, {"RANK": "0", "WORLD_SIZE": "1"}, None),
    "torchrun, devices by hand": ({"local-devices": "4,5"}, TORCHRUN_8, ("node1:29500", 4, 3, (4, 5), "torchrun")),
    "torchrun, coordinator by hand": (
        {},
        without(TORCHRUN, "MASTER") | HEAD,
        ("head:1234", 4, 3, None, "torchrun and JAXTRAIN_COORDINATOR"),
    ),
    "Slurm": ({}, SLURM, ("gpu01:61444", 5, 2, None, "Slurm")),
    "Slurm, several a node": ({}, SLURM_8, ("a:61444", 5, 2, (2,), "Slurm")),
    "Slurm, a number for all nodes": (
        {},
        without(SLURM_8, "TASKS_PER") | {"SLURM_NTASKS_PER_NODE": "1"},
        ("a:61444", 5, 2, None, "Slurm"),
    ),
    "Slurm, more tasks than nodes": ({}, without(SLURM_8, "TASKS_PER"), ("a:61444", 5, 2, (2,), "Slurm")),
    "Slurm, coordinator by hand": (
        {},
        SLURM | {"SLURM_STEP_NODELIST": "?"} | HEAD,
        ("head:1234", 5, 2, None, "Slurm and JAXTRAIN_COORDINATOR"),
    ),
    "Slurm, one task": ({}, SLURM | {"SLURM_NTASKS": "1"}, None),
    "Slurm, outside srun": ({}, without(SLURM, "STEP"), None),
    "Slurm, with an address for PyTorch": (
        {},
        SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "1", "WORLD_SIZE": "5"},
        ("gpu01:61444", 5, 2, None, "Slurm"),
    ),
    "Open MPI": ({}, MPI | HEAD, ("head:1234", 4, 1, None, "Open MPI and JAXTRAIN_COORDINATOR")),
    "Open MPI, several a node": ({}, MPI_2 | {"MASTER_ADDR": "node1", "MASTER_PORT": "5"}, ("node1:5", 4, 1, (1,), "Open MPI")),
    "Open MPI, one process": ({}, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    "Kubernetes": (
        {},
        KUBERNETES | HEAD | {"JAXTRAIN_NUM_PROCESSES": "2"},
        ("head:1234", 2, 1, None, "Kubernetes and JAXTRAIN_COORDINATOR and JAXTRAIN_NUM_PROCESSES"),
    ),
    "Kubernetes, an index alone": ({}, KUBERNETES, None),
}

# name -> (options, environment, words of each problem, in order)
WRONG: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "coordinator alone": (
        {"coordinator": "head:1"},
        {},
        ["--num-processes: is not known from --coordinator", "--process-id: is not known"],
    ),
    "no coordinator": ({"num-processes": "2", "process-id": "0"}, {}, ["JAXTRAIN_COORDINATOR, or --coordinator, to HOST:PORT"]),
    "no port": ({"coordinator": "head"}, OURS, ["--coordinator = 'head': must be HOST:PORT"]),
    "bare IPv6": ({"coordinator": "::1:99"}, OURS, ["--coordinator = '::1:99': must be HOST:PORT"]),
    "a URL": ({}, OURS | {"JAXTRAIN_COORDINATOR": "http://head:1234"}, ["JAXTRAIN_COORDINATOR = 'http://head:1234'"]),
    "a port too high": ({"coordinator": "head:65536"}, OURS, ["--coordinator = 'head:65536'"]),
    "not numbers": (
        {"num-processes": "two", "process-id": "-1"},
        OURS,
        ["--num-processes = 'two': must be a whole number from 1", "--process-id = '-1': must be a whole number from 0"],
    ),
    "no processes": ({"num-processes": "0"}, OURS, ["--num-processes = '0'"]),
    "counted from 1": ({"process-id": "2"}, OURS, ["--process-id: process 2 cannot be one of 2"]),
    "devices": ({"local-devices": "0,0"}, OURS, ["--local-devices = '0,0': must be different whole numbers"]),
    "devices of what": ({}, OURS | {"JAXTRAIN_LOCAL_DEVICES": "0-3"}, ["JAXTRAIN_LOCAL_DEVICES = '0-3'"]),
    "devices of one process": ({"local-devices": "0"}, {}, ["--local-devices = '0': is for runs of several processes"]),
    "all at once": (
        {"coordinator": "x", "num-processes": "x", "process-id": "x", "local-devices": "x"},
        {},
        ["--coordinator", "--num-processes", "--process-id", "--local-devices"],
    ),
    "rank alone": ({}, {"RANK": "0"}, ["RANK = '0': is set without WORLD_SIZE"]),
    "world alone": ({}, {"WORLD_SIZE": "8"}, ["WORLD_SIZE = '8': is set without RANK"]),
    "torchrun without master": ({}, {"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR: is not set", "MASTER_PORT: is not set"]),
    "torchrun, bad numbers": (
        {},
        TORCHRUN | {"RANK": "a", "MASTER_PORT": "0"},
        ["RANK = 'a'", "MASTER_PORT = '0': must be a whole number from 1 to 65535"],
    ),
    "torchrun, rank too high": ({}, TORCHRUN | {"RANK": "4"}, ["torchrun: process 4 cannot be one of 4"]),
    "torchrun, half a node": ({}, TORCHRUN | {"LOCAL_RANK": "1"}, ["LOCAL_WORLD_SIZE: is not set"]),
    "torchrun, local rank too high": (
        {},
        TORCHRUN_8 | {"LOCAL_RANK": "2"},
        ["LOCAL_RANK = '2': must be a whole number from 0 to 1"],
    ),
    "Slurm, no rank": ({}, without(SLURM, "PROCID"), ["SLURM_PROCID: is not set"]),
    "Slurm, no local rank": ({}, without(SLURM_8, "LOCALID"), ["SLURM_LOCALID: is not set"]),
    "Slurm, strange nodes": ({}, SLURM | {"SLURM_STEP_NODELIST": "gpu[01-"}, ["SLURM_STEP_NODELIST = 'gpu[01-': is no list"]),
    "Slurm, bad numbers": (
        {},
        SLURM | {"SLURM_NTASKS": "many", "SLURM_JOB_ID": "4_1"},
        ["SLURM_NTASKS = 'many'", "SLURM_JOB_ID = '4_1'"],
    ),
    "Open MPI, no coordinator": (
        {},
        MPI,
        ["--coordinator: is not known from Open MPI: the address of process 0. Set JAXTRAIN_COORD"],
    ),
    "Open MPI, no port": ({}, MPI | {"MASTER_ADDR": "node1"}, ["MASTER_PORT: is not set"]),
    "Open MPI, no rank": ({}, HEAD | {"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK: is not set"]),
    "Kubernetes, no number": (
        {},
        KUBERNETES | HEAD,
        ["--num-processes: is not known from Kubernetes and JAXTRAIN_COORDINATOR"],
    ),
    "Kubernetes, no coordinator": ({}, KUBERNETES | {"JAXTRAIN_NUM_PROCESSES": "2"}, ["--coordinator: is not known"]),
    "Kubernetes, index too high": (
        {},
        KUBERNETES | HEAD | {"JAXTRAIN_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "2"},
        ["Kubernetes and JAXTRAIN_NUM_PROCESSES: process 2 cannot be one of 2"],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_launcher_is_recognised(case: str):
    options, environ, expected = FOUND[case]
    cluster, problems = detect(options, environ)
    assert not problems, "\n".join(map(str, problems))
    assert cluster == (expected and Cluster(*expected))


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_in_it_are_named_with_a_fix(case: str):
    options, environ, expected = WRONG[case]
    cluster, problems = detect(options, environ)
    assert cluster is None
    texts = [str(problem) for problem in problems]
    assert len(texts) == len(expected), texts
    for text, part in zip(texts, expected, strict=True):
        assert part in text
        assert text.count(". ") >= 1 and text.endswith("."), text  # a rule and a fix


def test_slurm_ranks_agree_on_the_coordinator():
    found = [detect({}, SLURM_8 | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 3)})[0] for i in range(5)]
    assert [c and (c.coordinator, c.process_id) for c in found] == [("a:61444", i) for i in range(5)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("a1,b-2.x_y", ["a1", "b-2.x_y"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[08,10]-ib", ["r1n08-ib", "r1n10-ib", "r2n08-ib", "r2n10-ib"]),
        ("n[098-0101]", ["n098", "n099", "n100", "n101"]),
        *[(text, []) for text in ("", "n[", "n]", "n[1-]", "n[a]", "a,,b", "n[[1]]", "a b")],
    ],
)
def test_slurms_node_lists_are_read(text: str, names: list[str]):
    assert node_names(text) == names


@pytest.mark.parametrize(
    ("kind", "ids", "count", "node"), [("gpu", None, 32, 8), ("gpu", (3,), 4, 1), ("gpu", (0, 1), 8, 2), ("cpu", (0, 1), 32, 8)]
)
def test_all_devices_of_a_run_are_those_of_all_its_processes(kind: str, ids: tuple[int, ...] | None, count: int, node: int):
    here = Devices(kind, "H200", 8, 140.0, "test")
    assert all_devices(here, None) == here
    found = all_devices(here, Cluster("head:1", 4, 0, ids, "the test"))
    assert (found.count, found.node) == (count, node)


# ---- Messages between processes


@pytest.fixture
def connect() -> Iterator[Callable[[Store, int], list[Peers]]]:
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


Connect = Callable[[Store, int], list[Peers]]


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
        store.blocking_key_value_get(f"jaxtrain/reached/{i}", 60_000)


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
    """After a rollback, `stop_here` stops every process at once, even one that has not read the request. No process waits for
    the agreed last step.
    """
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
    assert heard.get(timeout=60) == "SIGTERM"
    await_steps(store, 2)
    peers[1].listen(heard.put)
    assert heard.get(timeout=60) == "SIGTERM" and heard.empty()


def test_a_second_close_waits_for_the_first(connect: Connect):
    """If the second call returned first, its caller would end the process while the first call waits in the barrier."""
    store = Store()
    peers = connect(store, 2)
    store.barrier = threading.Barrier(2)
    first = threading.Thread(target=peers[1].close, daemon=True)
    second = threading.Thread(target=peers[1].close, daemon=True)
    first.start()
    while store.barrier.n_waiting == 0:
        pass
    second.start()
    second.join(0.2)
    assert second.is_alive()
    store.barrier.wait(60)
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()


def test_a_process_that_does_not_publish_its_step_is_named():
    store = Store(never=("jaxtrain/reached/1",))
    store.key_value_set("jaxtrain/who/0", "host here, pid 6")
    store.key_value_set("jaxtrain/who/1", "host there, pid 7")
    peers = Peers(0, 2, store)
    assert peers.may_start(1)
    peers.ask_to_stop("SIGTERM")
    store.blocking_key_value_get("jaxtrain/reached/0", 60_000)
    assert peers.may_start(1)
    with pytest.raises(PeerLost, match=r"process 1 \(host there, pid 7\) did not answer within 60 s \(last step\)"):
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
    with pytest.raises(PeerLost, match=r"process 1 \(host .*\) did not answer within 7 s \(b\)"):
        peers[0].gather("b", "", 7)


# ---- A process that dies or fails. tests/campaign/test_peers.py uses real processes.


class Losses:
    """Collect the messages about lost processes, by process."""

    def __init__(self, peers: list[Peers]):
        self.queues = [queue.Queue[str]() for _ in peers]
        for one, messages in zip(peers, self.queues, strict=True):
            one.watch(messages.put)

    def of(self, index: int) -> str:
        return self.queues[index].get(timeout=60)

    def none(self, *indices: int) -> bool:
        return all(self.queues[i].empty() for i in indices)


def test_a_failed_collective_is_blamed_on_the_process_that_ended(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    """The service reports a dead process after HEARTBEAT_S. A process whose collective failed waits for this report."""
    monkeypatch.setattr("jaxtrain.distributed.peers.HEARTBEAT_S", 1.0)
    monkeypatch.setattr("jaxtrain.distributed.peers.POLL_S", 0.05)
    store = Store()
    peers = connect(store, 2)
    losses = Losses(peers)
    closing = threading.Thread(
        target=peers[0].close, args=("JaxRuntimeError: Gloo AllGather failed: Connection reset by peer",)
    )
    closing.start()
    time.sleep(1.3)
    peers[0]._report("process 1 is dead")
    assert losses.of(0) == "process 1 is dead"
    closing.join(60)


def test_a_failure_is_reported_to_the_others_with_its_reason(connect: Connect):
    store = Store()
    peers = connect(store, 3)
    losses = Losses(peers)
    peers[1].close("OSError: no")
    peers[1].close()  # only the first call counts
    expected = "process 1 (host h1, pid 1) has failed: OSError: no"
    assert losses.of(0) == losses.of(2) == expected
    peers[2]._report("once is enough")
    late: list[str] = []
    peers[2].watch(late.append)
    assert late == [expected] and losses.none(0, 1, 2)


def test_all_report_the_same_dead_process(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxtrain.distributed.peers.POLL_S", 0.01)
    store = Store()
    peers = connect(store, 3)
    losses = Losses(peers)
    store.live = {0, 2}
    threads = [threading.Thread(target=peers[i]._watch_live, daemon=True) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for i in (0, 2):
        assert losses.of(i) == "process 1 (host h1, pid 1) is dead: it ended, or sent no heartbeat for 15 s"
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("aborting", [False, True])
def test_process_0_without_an_answer_is_reported(aborting: bool, monkeypatch: pytest.MonkeyPatch):
    """Process 0 is reported after one unanswered request if JAX is aborting this process, otherwise after five."""
    monkeypatch.setattr("jaxtrain.distributed.peers.is_aborting", lambda: aborting)
    store = Store(never=("jaxtrain/who/0",))
    peers = Peers(1, 2, store)
    losses = Losses([peers])
    assert losses.of(0) == f"process 0 {'is gone' if aborting else 'has not answered for 10 s'}"
    assert store.asked.count("jaxtrain/who/0") == (1 if aborting else 5)


def test_the_end_of_the_service_is_reported(monkeypatch: pytest.MonkeyPatch):
    store = Store()
    peers = Peers(1, 2, store)
    losses = Losses([peers])
    store.gone = True
    assert losses.of(0).startswith("process 0 is gone")
    peers.ask_to_stop("SIGTERM")  # the loss has been reported already
    with pytest.raises(PeerLost, match="process 0 does not answer: UNAVAILABLE"):
        peers.gather("a", "", 60)


def test_process_0_leaves_last(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    """Process 0 leaves after the others. In this test, the others report that they leave once process 0 waits for them."""
    is_waiting = threading.Event()

    class Alone(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            is_waiting.set()
            return super().wait(timeout)

    monkeypatch.setattr("jaxtrain.distributed.peers.POLL_S", 0.01)
    store = Store()
    peers = connect(store, 3)
    store.live = {0, 1, 2}
    store.barrier = threading.Barrier(3)
    losses, left = Losses(peers), []
    peers[0]._alone = Alone()

    def set_once_process_0_waits(key: str, value: str, one: Peers) -> None:
        if key.startswith("left/"):
            is_waiting.wait(5)
        Peers._set(one, key, value)

    for one in peers[1:]:
        monkeypatch.setattr(one, "_set", functools.partial(set_once_process_0_waits, one=one))

    def end(one: Peers) -> None:
        one.close()
        left.append(one.process_index)
        store.live.discard(one.process_index)

    threads = [threading.Thread(target=end, args=(one,), daemon=True) for one in peers]
    threads.append(threading.Thread(target=peers[0]._watch_live, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads[:3]:
        thread.join(60)
    assert sorted(left) == [0, 1, 2] and left[-1] == 0 and losses.none(0, 1, 2)
    peers[0].ask_to_stop("too late")
    assert peers[0].stop_reason is None


# ---- The start


def test_a_port_in_use_is_refused_after_half_a_minute(monkeypatch: pytest.MonkeyPatch):
    """The service waits for 30 s before the refusal: an earlier attempt of the same job may still hold the port."""
    monkeypatch.setattr(service, "time", clock := Clock())
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster = Cluster(f"127.0.0.1:{other.getsockname()[1]}", 2, 0, None, "the test")
        with pytest.raises(ClusterError) as raised:
            service._await_free_port(cluster)
    assert str(raised.value).startswith(f"process 0 cannot listen at {cluster.coordinator}: address already in use. Fix: ")
    assert 1030 <= clock.now <= 1031
    service._await_free_port(cluster)


@pytest.mark.parametrize(("blocked", "aborting"), [([signal.SIGABRT], True), (signal.valid_signals(), False)])
def test_an_abort_is_seen_in_the_mask_of_a_thread(blocked: Any, aborting: bool):
    is_blocked, seen = threading.Event(), threading.Event()

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        is_blocked.set()
        seen.wait(60)

    assert not service.is_aborting()
    thread = threading.Thread(target=block)
    thread.start()
    is_blocked.wait(60)
    assert service.is_aborting() == aborting
    seen.set()
    thread.join()
    assert not service.is_aborting()


def test_processes_are_listed_in_words():
    assert [words.listed(range(n)) for n in (1, 2, 3)] == ["process 0", "processes 0 and 1", "processes 0, 1 and 2"]
    assert words.listed(range(9)) == "processes 0, 1, 2, 3, 4, 5, 6 and 2 more"
