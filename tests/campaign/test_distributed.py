"""Processes of a run: who says that there are several, how they meet, and what they tell each other, with real processes.

The processes are of one device each, on this machine's CPU; their collectives are gloo's.
"""

import dataclasses
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtrain import distributed
from jaxtrain.distributed import Cluster, ClusterError, PeerLost, Peers, detect, meeting
from jaxtrain.distributed import peers as peers_module
from jaxtrain.distributed.cluster import node_names

REPO = Path(__file__).resolve().parents[2]

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

# name -> (options, environment, what is detected)
FOUND: dict[str, tuple[dict[str, str], dict[str, str], Cluster | None]] = {
    "nothing": ({}, {}, None),
    "not given": (dict.fromkeys(distributed.FIELDS, ""), {}, None),
    "options": (
        {"coordinator": "[::1]:99", "num-processes": "2", "process-id": "0", "local-devices": "0, 1"},
        OURS | SLURM,
        Cluster("[::1]:99", 2, 0, (0, 1), "--coordinator"),
    ),
    "variables": ({}, OURS, Cluster("head:1234", 2, 1, None, "JAXTRAIN_COORDINATOR")),
    "an option over a variable": ({"process-id": "0"}, OURS, Cluster("head:1234", 2, 0, None, "JAXTRAIN_COORDINATOR")),
    "one process": ({}, {"JAXTRAIN_NUM_PROCESSES": "1"}, None),
    "one process, whatever Slurm says": ({"num-processes": "1"}, SLURM, None),
    "torchrun": ({}, TORCHRUN, Cluster("node1:29500", 4, 3, None, "torchrun")),
    "torchrun, several a node": ({}, TORCHRUN_8, Cluster("node1:29500", 4, 3, (1,), "torchrun")),
    "torchrun, one a node": ({}, TORCHRUN_8 | {"LOCAL_WORLD_SIZE": "1"}, Cluster("node1:29500", 4, 3, None, "torchrun")),
    "torchrun listens itself": (
        {},
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        Cluster("node1:29501", 4, 3, None, "torchrun"),
    ),
    "torchrun under Slurm": ({}, SLURM | TORCHRUN, Cluster("node1:29500", 4, 3, None, "torchrun")),
    "torchrun, one process": ({}, {"RANK": "0", "WORLD_SIZE": "1"}, None),
    "torchrun, devices by hand": (
        {"local-devices": "4,5"},
        TORCHRUN_8,
        Cluster("node1:29500", 4, 3, (4, 5), "torchrun"),
    ),
    "torchrun, coordinator by hand": (
        {},
        {k: v for k, v in TORCHRUN.items() if "MASTER" not in k} | HEAD,
        Cluster("head:1234", 4, 3, None, "torchrun and JAXTRAIN_COORDINATOR"),
    ),
    "Slurm": ({}, SLURM, Cluster("gpu01:61444", 5, 2, None, "Slurm")),
    "Slurm, several a node": ({}, SLURM_8, Cluster("a:61444", 5, 2, (2,), "Slurm")),
    "Slurm, a number for all nodes": (
        {},
        {k: v for k, v in SLURM_8.items() if "TASKS_PER" not in k} | {"SLURM_NTASKS_PER_NODE": "1"},
        Cluster("a:61444", 5, 2, None, "Slurm"),
    ),
    "Slurm, more tasks than nodes": (
        {},
        {k: v for k, v in SLURM_8.items() if "TASKS_PER" not in k},
        Cluster("a:61444", 5, 2, (2,), "Slurm"),
    ),
    "Slurm, coordinator by hand": (
        {},
        SLURM | {"SLURM_STEP_NODELIST": "?"} | HEAD,
        Cluster("head:1234", 5, 2, None, "Slurm and JAXTRAIN_COORDINATOR"),
    ),
    "Slurm, one task": ({}, SLURM | {"SLURM_NTASKS": "1"}, None),
    "Slurm, outside srun": ({}, {k: v for k, v in SLURM.items() if "STEP" not in k}, None),
    "Slurm, with an address for PyTorch": (
        {},
        SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "1", "WORLD_SIZE": "5"},
        Cluster("gpu01:61444", 5, 2, None, "Slurm"),
    ),
    "Open MPI": ({}, MPI | HEAD, Cluster("head:1234", 4, 1, None, "Open MPI and JAXTRAIN_COORDINATOR")),
    "Open MPI, several a node": (
        {},
        MPI_2 | {"MASTER_ADDR": "node1", "MASTER_PORT": "5"},
        Cluster("node1:5", 4, 1, (1,), "Open MPI"),
    ),
    "Open MPI, one process": ({}, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    "Kubernetes": (
        {},
        KUBERNETES | HEAD | {"JAXTRAIN_NUM_PROCESSES": "2"},
        Cluster("head:1234", 2, 1, None, "Kubernetes and JAXTRAIN_COORDINATOR and JAXTRAIN_NUM_PROCESSES"),
    ),
    "Kubernetes, an index alone": ({}, KUBERNETES, None),
}

# name -> (options, environment, for each problem, in order, words of it)
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
    "counted from 1": (
        {"process-id": "2"},
        OURS,
        ["--process-id: process 2 cannot be one of 2"],
    ),
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
    "Slurm, no rank": ({}, {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, ["SLURM_PROCID: is not set"]),
    "Slurm, no local rank": ({}, {k: v for k, v in SLURM_8.items() if k != "SLURM_LOCALID"}, ["SLURM_LOCALID: is not set"]),
    "Slurm, strange nodes": ({}, SLURM | {"SLURM_STEP_NODELIST": "gpu[01-"}, ["SLURM_STEP_NODELIST = 'gpu[01-': is no list"]),
    "Slurm, bad numbers": (
        {},
        SLURM | {"SLURM_NTASKS": "many", "SLURM_JOB_ID": "4_1"},
        ["SLURM_NTASKS = 'many'", "SLURM_JOB_ID = '4_1'"],
    ),
    "Open MPI, no coordinator": (
        {},
        MPI,
        ["--coordinator: is not known from Open MPI: where process 0 is. Set JAXTRAIN_COORD"],
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
def test_detect(case):
    options, environ, expected = FOUND[case]
    cluster, problems = detect(options, environ)
    assert not problems, "\n".join(map(str, problems))
    assert cluster == expected


@pytest.mark.parametrize("case", WRONG)
def test_detect_problems(case):
    options, environ, expected = WRONG[case]
    cluster, problems = detect(options, environ)
    assert cluster is None
    texts = [str(problem) for problem in problems]
    assert len(texts) == len(expected), texts
    for text, words in zip(texts, expected, strict=True):
        assert words in text
        assert text.count(". ") >= 1 and text.endswith("."), text  # a rule and a remedy


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
def test_node_names(text, names):
    assert node_names(text) == names


# ---- A run of one process


def test_one_process_waits_for_nothing():
    peers = Peers(0, 1)
    assert peers.gather("a", "x", 0) == ["x"]
    peers.watch(1, 3, lambda message: pytest.fail(message))
    assert all(peers.may_start(step) for step in range(1, 5)) and peers.stop_reason is None
    peers.ask_to_stop("SIGTERM")
    peers.ask_to_stop("once more")
    assert peers.may_start(4) and not peers.may_start(5)
    assert peers.stop_reason == "SIGTERM"
    peers.close()
    peers.close()


def test_a_watch_leaves_room_for_a_late_beat():
    with pytest.raises(ValueError, match="three times"):
        Peers(0, 1).watch(1, 2, print)


class Store:
    """The coordination service's store, for processes that are threads."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_try_get(self, key: str) -> str:
        with self.changed:
            if key not in self.values:
                raise RuntimeError("NOT_FOUND")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(key.rstrip("/") + "/")]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)


def test_stop_at_the_furthest_step():
    store = Store()
    peers = [Peers(i, 3, store) for i in range(3)]
    for i, reached in enumerate((3, 7, 0)):  # one has not begun
        for step in range(1, reached + 1):
            assert peers[i].may_start(step)
    peers[2].ask_to_stop("SIGTERM")
    peers[0].ask_to_stop("too late")
    while any(one.stop_reason is None for one in peers):  # until then they may go on
        time.sleep(0.01)
    for one in peers:
        assert one.may_start(7) and not one.may_start(8) and not one.may_start(9)
        assert one.stop_reason == "SIGTERM"


def test_back_at_an_earlier_step_the_agreed_one_is_not_waited_for():
    """A rollback after an agreement: the processes tell each other, also those that have not heard who asked."""
    store = Store()
    peers = [Peers(i, 2, store) for i in range(2)]
    assert all(one.may_start(step) for one in peers for step in (1, 2, 3))
    peers[0].ask_to_stop("SIGTERM")
    while peers[0].stop_reason is None:
        time.sleep(0.01)
    for one in peers:
        one.stop_here("SIGTERM")
        assert not one.may_start(2) and one.stop_reason == "SIGTERM"


@pytest.mark.parametrize("seed", range(20))
def test_no_deadlock_in_a_collective(seed):
    """Loops that wait for each other in every step, as devices do, and differ in how far they run ahead."""
    dice, store = random.Random(seed), Store()
    peers = [Peers(i, 3, store) for i in range(3)]
    collectives = [threading.Barrier(3) for _ in range(10000)]
    ends: dict[int, int] = {}

    def loop(one: Peers, ahead: int, pause_s: float):
        step = 1
        while one.may_start(step):
            time.sleep(pause_s)
            if step > ahead:
                collectives[step - ahead].wait(timeout=5)
            step += 1
        for left in range(max(step - ahead, 1), step):
            collectives[left].wait(timeout=5)
        ends[one.process_index] = step

    threads = [threading.Thread(target=loop, args=(p, dice.randrange(3), dice.random() * 0.002)) for p in peers]
    for thread in threads:
        thread.start()
    time.sleep(dice.random() * 0.05)
    for asker in dice.sample(peers, dice.randint(1, 3)):
        asker.ask_to_stop(f"asked by {asker.process_index}")
    for thread in threads:
        thread.join()
    assert len(ends) == 3 and len(set(ends.values())) == 1
    assert len({one.stop_reason for one in peers}) == 1


def test_a_process_that_does_not_say_where_it_is(monkeypatch):
    monkeypatch.setattr(peers_module, "AGREE_S", 0.2)
    store = Store()
    store.key_value_set("jaxtrain/who/1", "host there, pid 7")
    peers = Peers(0, 2, store)
    assert peers.may_start(1)
    peers.ask_to_stop("SIGTERM")
    while peers.stop_reason is None:
        time.sleep(0.01)
    assert peers.may_start(1)
    with pytest.raises(PeerLost, match=r"process 1 \(host there, pid 7\) did not answer within 0.2 s"):
        peers.may_start(2)


def test_a_run_of_gathers_leaves_little_behind():
    store = Store()
    peers = [Peers(i, 2, store) for i in range(2)]

    def talk(one: Peers):
        for turn in range(20):
            assert one.gather("a", f"{one.process_index} {turn}", 10) == [f"0 {turn}", f"1 {turn}"]

    threads = [threading.Thread(target=talk, args=(one,)) for one in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.key_value_dir_get("jaxtrain/gather")) <= 4


# ---- Meeting


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def meet(counts: dict[int, int], timeout_s: float, port: int) -> dict[int, str]:
    """What `start` raises in each of these processes (index -> how many it believes there are), as threads of this one."""
    errors = {}

    def come(index: int, count: int):
        try:
            distributed.start(Cluster(f"127.0.0.1:{port}", count, index, None, "the test"), init_timeout_s=timeout_s)  # type: ignore
        except ClusterError as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=come, args=item) for item in counts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_who_is_missing():
    port = free_port()
    errors = meet({0: 5, 2: 5}, 1, port)
    assert errors[0] == errors[2]
    assert errors[0].startswith(f"processes 1, 3 and 4 of 5 did not come to 127.0.0.1:{port} within 1 s. ")


def test_no_process_0(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_S", 0.2)
    port = free_port()
    error = meet({1: 2}, 1, port)[1]
    assert error.startswith(f"process 1 of 2 did not meet process 0 at 127.0.0.1:{port} within 1 s: connection refused. ")
    assert "from the test" in error
    with socket.create_server(("127.0.0.1", port)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"), daemon=True).start()
        assert "within 1 s" in meet({1: 2}, 1, port)[1]


def test_processes_of_different_runs():
    errors = meet({0: 2, 1: 3}, 10, free_port())
    assert errors[0] == errors[1] and re.search(r"process 1 \(host .*\) was told of 3 processes, process 0 of 2", errors[0])


def test_two_that_are_the_same():
    port = free_port()
    cluster = Cluster(f"127.0.0.1:{port}", 3, 1, None, "the test")
    twins: list[str] = []

    def come():
        try:
            distributed.start(cluster, init_timeout_s=10)
        except ClusterError as error:
            twins.append(str(error))

    threads = [threading.Thread(target=come) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(ClusterError, match="two processes say that they are process 1"):
        distributed.start(dataclasses.replace(cluster, process_id=0), init_timeout_s=10)
    for thread in threads:
        thread.join()
    assert len(twins) == 2 and all("two processes" in text for text in twins)


def test_a_port_in_use(monkeypatch):
    monkeypatch.setattr(meeting, "LEAVING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = meet({0: 2}, 5, port)[0]
    assert error.startswith(f"process 0 cannot listen at 127.0.0.1:{port}: address already in use. ")


def test_strangers_do_not_count():
    port = free_port()
    result: dict[int, str] = {}
    thread = threading.Thread(target=lambda: result.update(meet({0: 2}, 2, port)))
    thread.start()
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"jaxtrain  1 x\n", b"jaxtrain 2 \xff x\n", b"jaxtrain 2 1\n"):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(words)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    thread.join()
    assert result[0].startswith("process 1 of 2 did not come")


# ---- Real processes

WORKER = """
import os, random, signal, sys, threading, time
from jaxtrain import distributed

port, count, me, mode, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
distributed.start(distributed.Cluster(f"127.0.0.1:{port}", count, me, None, "the test"), init_timeout_s=60)
peers = distributed.Peers.of_this_run()


def lost(message):
    print("lost:", message, flush=True)
    os._exit(75)


if mode == "gather":
    print(peers.gather("a", f"one {me}", 30), peers.gather("a", f"two {me}", 30), peers.gather("b", "", 30))
    if me != victim:
        try:
            peers.gather("late", "", 1)
        except distributed.PeerLost as error:
            print(error)
    peers.gather("end", "", 30)
    from jax._src import distributed as private
    print("keys", len(private.global_state.client.key_value_dir_get(f"jaxtrain/gather/a")))
    peers.watch(0.2, 5, lost)
    time.sleep(0.5 * me)  # process 0, which holds the store, is the first to be done
    peers.close()
    time.sleep(1)  # longer than a beat: nobody may think that one is dead
    sys.exit(0)

peers.watch(0.2, 2, lost)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((count,), ("data",))
split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
ones = jax.make_array_from_callback((count,), split, lambda i: np.ones(1, np.float32))
total = jax.jit(jnp.sum, out_shardings=whole)  # waits for every process
total(ones).block_until_ready()

if mode == "stop":
    dice = random.Random(me)
    if me == victim:
        threading.Timer(0.7, peers.ask_to_stop, [f"SIGTERM on {me}"]).start()
    step = 1
    while peers.may_start(step):
        time.sleep(dice.random() * 0.1)
        result = total(ones)
        if me != 1:
            result.block_until_ready()
        step += 1
    print(f"stopped before {step}: {peers.stop_reason}", flush=True)
    peers.close()
    sys.exit(0)

if me == victim:
    print("victim", flush=True)
    if mode == "fail":
        peers.close("ValueError: of the test")
        distributed.leave(1)
    if mode == "raise":
        raise ValueError("of the test")
    if mode == "exit":
        sys.exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[mode])
print("in the collective", flush=True)
total(ones).block_until_ready()
print("out of the collective", flush=True)
"""


@dataclasses.dataclass
class Ended:
    """How a process ended: its exit code, all it wrote, and the seconds since the first of them, the victim, was done."""

    code: int
    text: str
    after_s: float


def run(tmp_path: Path, count: int, mode: str, victim: int = 0, limit_s: float = 40) -> list[Ended]:
    """`count` processes of WORKER. A victim that is frozen is ended once all others have."""
    script, port = tmp_path / "worker.py", str(free_port())
    script.write_text(WORKER)
    environ = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower() and not k.startswith(("XLA_", "JAX"))}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}
    logs = [tmp_path / f"{i}.txt" for i in range(count)]
    processes = []
    for i, log in enumerate(logs):
        with log.open("wb") as out:
            command = [sys.executable, str(script), port, str(count), str(i), mode, str(victim)]
            processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ))
    ended: dict[int, float] = {}
    fell = None
    until = time.monotonic() + limit_s
    waiting_for = count - (mode == "freeze")
    try:
        while len(ended) < waiting_for and time.monotonic() < until:
            now = time.monotonic()
            if fell is None and "victim\n" in logs[victim].read_text(errors="replace"):
                fell = now
            ended |= {i: now for i, p in enumerate(processes) if i not in ended and p.poll() is not None}
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    start = fell if fell is not None else min(ended.values(), default=0.0)
    texts = [log.read_text(errors="replace") for log in logs]
    assert len(ended) == waiting_for, "\n\n".join(texts)
    return [Ended(p.returncode, t, ended.get(i, start) - start) for i, (p, t) in enumerate(zip(processes, texts, strict=True))]


def test_gather(tmp_path):
    for i, one in enumerate(run(tmp_path, 2, "gather", victim=1)):
        assert one.code == 0, one.text
        assert "['one 0', 'one 1'] ['two 0', 'two 1'] ['', '']" in one.text
        assert "keys 2" in one.text  # of two turns
        late = re.search(r"process 1 \(host \S+, pid \d+\) did not answer within 1 s \(late\)", one.text)
        assert bool(late) == (i == 0), one.text
        assert "lost" not in one.text


def test_all_stop_at_one_step(tmp_path, asks=2):
    processes = run(tmp_path, 3, "stop", victim=asks)
    assert [p.code for p in processes] == [0, 0, 0], "\n".join(p.text for p in processes)
    said = {re.search(r"stopped before (\d+): (.*)", p.text) for p in processes}
    assert len({match and match.groups() for match in said}) == 1
    match = said.pop()
    assert match and int(match[1]) > 2 and match[2] == f"SIGTERM on {asks}"


@pytest.mark.parametrize(
    ("mode", "count", "victim", "within_s", "words"),
    [
        ("kill", 3, 1, 8, r"process 1 \(host \S+, pid \d+\) has not been heard of for 2 s"),
        ("kill", 3, 0, 4, r"process 0 \(host \S+, pid \d+\) is gone: nothing answers at 127.0.0.1:\d+"),
        ("freeze", 2, 1, 8, r"process 1 \(host \S+, pid \d+\) has not been heard of for 2 s"),
        ("freeze", 2, 0, 8, r"process 0 \(host \S+, pid \d+\) has not been heard of for 2 s"),
        ("fail", 3, 2, 4, r"process 2 \(host \S+, pid \d+\) has failed: ValueError: of the test"),
        ("exit", 2, 1, 4, r"process 1 \(host \S+, pid \d+\) has failed: it ended before its work was done"),
        ("raise", 2, 0, 4, r"process 0 \(host \S+, pid \d+\) has failed: ValueError: of the test"),
    ],
)
def test_a_dead_peer(tmp_path, mode, count, victim, within_s, words):
    """The others leave with their own exit code, in time, and name the one that died: not jax's abort."""
    processes = run(tmp_path, count, mode, victim)
    assert processes[victim].code == (-signal.SIGKILL if mode in ("kill", "freeze") else 1)
    for i, one in enumerate(processes):
        if i != victim:
            assert one.code == 75, one.text
            assert re.search(f"lost: {words}\n", one.text), one.text
            assert one.after_s < within_s
            assert "out of the collective" not in one.text
