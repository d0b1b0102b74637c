"""Processes of a run, in one process: who says that there are several, how they meet, agree and notice a death.

Real processes are in tests/campaign/test_processes.py.
"""

import concurrent.futures
import errno
import socket
import types
from typing import Any

import pytest
from fakes import Clock, Store, Turns

from jaxtrain import distributed
from jaxtrain.distributed import Cluster, ClusterError, PeerLost, Peers, detect, meeting, watch, words
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


# name -> (options, environment, the fields of the Cluster that is detected)
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


# ---- Agreement: where to stop, and what is gathered


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
    with pytest.raises(ValueError, match="three times"):
        Peers(0, 1).watch(1, 2, print)


def said_where(store: Store, count: int) -> None:
    """Wait until all processes have said which step they have reached."""
    for i in range(count):
        store.blocking_key_value_get(f"jaxtrain/reached/{i}", 60_000)


def test_all_stop_at_the_furthest_step():
    store = Store()
    peers = [Peers(i, 3, store) for i in range(3)]
    for i, reached in enumerate((3, 7, 0)):  # one has not begun
        assert all(peers[i].may_start(step) for step in range(1, reached + 1))
    peers[2].ask_to_stop("SIGTERM")
    peers[0].ask_to_stop("too late")
    said_where(store, 3)  # until then they may go on
    for one in peers:
        assert one.may_start(7) and not one.may_start(8) and not one.may_start(9)
        assert one.stop_reason == "SIGTERM"


def test_back_at_an_earlier_step_the_agreed_one_is_not_waited_for():
    """A rollback after an agreement: the processes tell each other, also those that have not heard who asked."""
    store = Store()
    peers = [Peers(i, 2, store) for i in range(2)]
    assert all(one.may_start(step) for one in peers for step in (1, 2, 3))
    peers[0].ask_to_stop("SIGTERM")
    said_where(store, 2)
    for one in peers:
        one.stop_here("SIGTERM")
        assert not one.may_start(2) and one.stop_reason == "SIGTERM"


def test_a_process_that_does_not_say_where_it_is_is_named():
    store = Store(never=("jaxtrain/reached/1",))
    store.key_value_set("jaxtrain/who/1", "host there, pid 7")
    peers = Peers(0, 2, store)
    assert peers.may_start(1)
    peers.ask_to_stop("SIGTERM")
    store.blocking_key_value_get("jaxtrain/reached/0", 60_000)
    assert peers.may_start(1)
    with pytest.raises(PeerLost, match=r"process 1 \(host there, pid 7\) did not answer within 60 s \(where to stop\)"):
        peers.may_start(2)


def test_gathers_leave_little_behind_and_name_who_is_missing():
    store = Store(never=("jaxtrain/gather/b/0/1",))
    peers = [Peers(i, 3, store) for i in range(3)]

    def talk(one: Peers) -> None:
        for turn in range(20):
            assert one.gather("a", f"{one.process_index} {turn}", 60) == [f"{i} {turn}" for i in range(3)]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(talk, peers))
    assert len(store.key_value_dir_get("jaxtrain/gather")) <= 6
    store.key_value_set("jaxtrain/gather/b/0/2", "")
    with pytest.raises(PeerLost, match=r"process 1 \(host .*\) did not answer within 7 s \(b\)"):
        peers[0].gather("b", "", 7)


# ---- The watch: beats every second, dead after three


class Watched:
    """A watch by process `me` of three, without its threads, and what the others say."""

    def __init__(self, me: int, monkeypatch: pytest.MonkeyPatch):
        self.clock, self.store, self.lost = Clock(), Store(), []
        monkeypatch.setattr(watch, "time", self.clock)
        peers: Any = types.SimpleNamespace(process_index=me, count=3, who=lambda i, wait_s=0: f"process {i}")
        self.watch: Any = watch.Watch(peers, self.store, "head:1", 1.0, 3.0, self.lost.append)

    def say(self, **words: str) -> None:
        """p1="alive": each beat anew; other words as they are."""
        for name, text in words.items():
            beat = f"alive {self.clock.now}" if text == "alive" else text
            self.store.key_value_set(f"jaxtrain/beat/{name[1:]}", beat, True)

    def turns(self, *words: dict[str, str]) -> Turns:
        return Turns(self.clock, *(lambda said=said: self.say(**said) for said in words))


BOTH = {"p1": "alive", "p2": "alive"}


@pytest.mark.parametrize(
    ("words", "lost", "at"),
    [
        ([BOTH] * 9, None, 10),
        ([BOTH, BOTH, *[{"p1": "alive"}] * 9], "process 2 has not been heard of for 3 s", 6),
        ([{"p2": "alive"}] * 9, "process 1 has not been heard of for 3 s", 4),  # it never began
        ([BOTH, {"p1": "failed OSError: no", "p2": "alive"}], "process 1 has failed: OSError: no", 2),
        ([BOTH, {"p1": "left", "p2": "alive"}, *[{"p2": "alive"}] * 9], None, 12),
        ([BOTH, {"p1": "left", "p2": "left"}, *[{}] * 9], None, 12),
    ],
)
def test_process_0_notices_who_has_died(words: list[dict[str, str]], lost: str, at: int, monkeypatch: pytest.MonkeyPatch):
    watched = Watched(0, monkeypatch)
    watched.watch.quiet = watched.turns(*words)
    watched.watch.attend()
    assert watched.lost == ([lost] if lost else [])
    waited = 2.5 if lost else 0.0  # until the others have read it
    assert watched.clock.now == 1000 + at + waited
    assert watched.store.values["jaxtrain/beat/0"].startswith(f"lost {lost}" if lost else "alive ")
    assert watched.watch.everyone_left.is_set() == (words[1].get("p2") == "left")


def test_a_pause_of_ones_own_says_nothing_about_the_others(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(0, monkeypatch)
    pauses = Turns(watched.clock, lambda: watched.say(**BOTH), lambda: watched.clock.sleep(100), lambda: watched.say(**BOTH))
    watched.watch.quiet = pauses
    watched.watch.attend()
    assert watched.lost == [] and pauses.taken == 3


def test_the_others_hear_from_process_0_who_has_died(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(2, monkeypatch)
    watched.watch.quiet = watched.turns({"p0": "alive"}, {"p0": "alive"}, {}, {"p0": "lost process 1 has failed: x"}, {})
    watched.watch.beat()
    assert watched.lost == ["process 1 has failed: x"] and watched.watch.heard == 3
    assert watched.store.values["jaxtrain/beat/2"] == "alive 4"
    watched.watch.report("once is enough")
    assert len(watched.lost) == 1


@pytest.mark.parametrize(
    ("answers", "lost", "at"),
    [
        ("ssssssss", "process 0 has not been heard of for 3 s", 1004),  # s: silence on the line
        ("hhhhhhhhhh", None, 1010),  # h: silence there, and a beat in the store
        ("hhcchh", None, None),  # c: closed by the service, which lives
        ("hhcrh", "process 0 is gone: nothing answers at head:1", None),  # r: refused
        ("r" * 99, "process 0 has not been heard of for 3 s", 1003),  # never reached: a proxy may stand in between
    ],
)
def test_the_others_notice_the_end_of_process_0(answers: str, lost: str, at: float, monkeypatch: pytest.MonkeyPatch):
    watched = Watched(1, monkeypatch)
    clock, left = watched.clock, list(answers)
    over = Turns(clock)
    over.wait = lambda seconds: bool(clock.sleep(seconds))  # type: ignore[method-assign]
    over.is_set = lambda: not left  # type: ignore[method-assign]

    class Line:
        def recv(self, size: int) -> bytes:
            answer = left.pop(0) if left else "c"
            if answer == "c":
                return b""
            clock.sleep(1)
            watched.watch.heard += answer == "h"
            raise TimeoutError

        def close(self) -> None:
            pass

    def connect(address: tuple[str, int], timeout: float) -> Line:
        assert (address, timeout) == (("head", 1), 1.0)
        if left and left[0] == "r":
            left.pop(0)
            raise ConnectionRefusedError
        return Line()

    monkeypatch.setattr(watch.socket, "create_connection", connect)
    watched.watch.ending = over
    watched.watch.hold_the_line()
    assert watched.lost == ([lost] if lost else [])
    assert at is None or clock.now == pytest.approx(at, abs=0.1)


# ---- Meeting: process 0 waits for all others, and sends them on


class Door:
    """Process 0's port, to which these have come: what each says, and whether it hangs up."""

    def __init__(self, *hellos: tuple[bytes, bool]):
        self.visitors, self.guests = [], []
        for text, hangs_up in hellos:
            visitor, guest = socket.socketpair()
            guest.sendall(text)
            if hangs_up:
                guest.close()
            self.visitors.append(visitor)
            self.guests.append(guest)
        self.left = iter(self.visitors)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 9

    def accept(self) -> tuple[socket.socket, str]:
        for visitor in self.left:
            return visitor, ""
        raise TimeoutError

    def heard(self) -> list[str]:
        """What each guest was told; "" for one that hung up or was sent away."""
        found = []
        for visitor, guest in zip(self.visitors, self.guests, strict=True):
            if guest.fileno() >= 0:
                visitor.close()
            found.append(guest.recv(4096).decode() if guest.fileno() >= 0 else "")
        return found


def hello(index: int, count: int = 3, hangs_up: bool = False) -> tuple[bytes, bool]:
    return f"jaxtrain {count} {index} host h{index}\n".encode(), hangs_up


STRANGERS = [(b"", True), (b"GET / HTTP/1.1\r\n\r\n", False), (b"jaxtrain  1 x\n", False), (b"jaxtrain 3 \xff x\n", False)]
ALIKE = "Give all processes the same number, and each its own id; both come from the test."


@pytest.mark.parametrize(
    ("came", "error"),
    [
        ([hello(2), hello(1)], None),
        ([hello(1, hangs_up=True), hello(1), hello(2)], None),  # it was started again
        ([*STRANGERS, hello(1), (b"jaxtrain 3 1\n", False), hello(2)], None),
        ([hello(2)], "process 1 of 3 did not come to here:1 within 9 s. "),
        (STRANGERS, "processes 1 and 2 of 3 did not come to here:1 within 9 s. "),
        ([hello(1, count=4)], f"process 1 (host h1) was told of 4 processes, process 0 of 3. {ALIKE}"),
        ([hello(1), hello(1)], f"two processes say that they are process 1: host h1, and host h1. {ALIKE}"),
        ([hello(0)], "two processes say that they are process 0: host "),
    ],
)
def test_process_0_waits_for_all_others(came: list[tuple[bytes, bool]], error: str | None, monkeypatch: pytest.MonkeyPatch):
    door = Door(*came)
    monkeypatch.setattr(meeting, "_bind", lambda cluster, deadline: door)
    cluster = Cluster("here:1", 3, 0, None, "the test")
    if error is None:
        meeting._receive(cluster, 9)
        assert [text == "go\n" for text in door.heard()] == [each in (hello(1), hello(2)) for each in came]
        return
    with pytest.raises(ClusterError) as raised:
        meeting._receive(cluster, 9)
    assert str(raised.value).startswith(error)
    told = [text for text in door.heard() if text]
    assert told == [f"no {raised.value}\n"] * (len(came) if came is not STRANGERS else 0), "whoever came hears why"


@pytest.mark.parametrize(
    ("answers", "error", "tries"),
    [
        ([None, None, b"go\n", b""], None, 4),  # nobody listens yet; and once more, until jax's service does
        ([b"no because\n"], "because", 1),
        ([None] * 99, "process 1 of 3 did not meet process 0 at head:7 within 4 s: connection refused. ", 20),
        ([b"HTTP/1.1 400 Bad Request\r\n"] * 99, "process 1 of 3 did not meet process 0 at head:7 within 4 s: something", 20),
    ],
)
def test_the_others_come_to_process_0(answers: list[Any], error: str | None, tries: int, monkeypatch: pytest.MonkeyPatch):
    """A try every half second, until the time of process 0 and five seconds more are over."""
    clock, ends = Clock(), []
    monkeypatch.setattr(meeting, "time", clock)
    left = iter(answers)

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("head", 7)
        answer = next(left)
        ends.append(answer)
        if answer is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        ours, theirs = socket.socketpair()
        theirs.sendall(answer)
        ends.append(theirs)  # stays open
        return ours

    monkeypatch.setattr(meeting.socket, "create_connection", connect)
    cluster = Cluster("head:7", 3, 1, None, "the test")
    if error is None:
        meeting._come(cluster, 4)
    else:
        with pytest.raises(ClusterError) as raised:
            meeting._come(cluster, 4)
        assert str(raised.value).startswith(error)
    assert len([e for e in ends if not isinstance(e, socket.socket)]) == tries
    said = [e.recv(4096) for e in ends if isinstance(e, socket.socket)]
    assert all(text.startswith(b"jaxtrain 3 1 host ") for text in said[: len(said) if error else 1])


def test_a_port_in_use_is_waited_for_and_then_told(monkeypatch: pytest.MonkeyPatch):
    """Half a minute: an earlier run of the same job may still hold it."""
    monkeypatch.setattr(meeting, "time", clock := Clock())
    with socket.create_server(("127.0.0.1", 0)) as other:
        cluster = Cluster(f"127.0.0.1:{other.getsockname()[1]}", 2, 0, None, "the test")
        with pytest.raises(ClusterError) as raised:
            meeting._receive(cluster, 300)
    assert str(raised.value).startswith(f"process 0 cannot listen at {cluster.coordinator}: address already in use. ")
    assert 1030 <= clock.now <= 1031


def test_processes_are_listed_in_words():
    assert [words.listed(range(n)) for n in (1, 2, 3)] == ["process 0", "processes 0 and 1", "processes 0, 1 and 2"]
    assert words.listed(range(9)) == "processes 0, 1, 2, 3, 4, 5, 6 and 2 more"
