"""A run of several processes: who says so (`detect`), how they meet (`start`), and what they tell each other (`Peers`).

`detect` reads options and the environment; it starts nothing and imports no jax. `start` connects this process to the others
before JAX is used. `Peers` speaks through jax's coordination service, a key-value store in process 0, and never through the
devices: it works while the training loop is blocked in a collective that another process has not begun, or never will.

Where a peer dies, jax leaves the survivors in their collective, or with its error, and aborts them with SIGABRT (exit code 134)
after 100 s. Where process 0 dies, and the store with it, jax aborts them at once, and no setting prevents that: its own
callback for this cannot be called from Python (jaxlib 0.11.2). `Peers.watch` is there sooner in both cases. Only where it is
not watching yet, or any more, and where something else handles SIGABRT (faulthandler), does the death of process 0 end the
others with 134.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import errno
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxtrain.config import Problem

FIELDS = ("coordinator", "num-processes", "process-id", "local-devices")
ADDRESS_REMEDY = "Give process 0's machine and a free port there, as node1:12321; the same in every process."

HELLO = "jaxtrain"  # begins what a process says when it comes to process 0, so that strangers are told apart
LEAVING_S = 30.0  # for an earlier run of the same job, which may still hold the port of process 0
GRACE_S = 5.0  # process 0, who knows best what is wrong, speaks first
AGREE_S = 60.0  # for all processes to say where they are, once one has asked to stop; none waits for its devices to say so
GOODBYE_S = 300.0  # process 0 holds the store: it leaves last. As long as jax waits in its own shutdown.
HOUR_S = 3600.0
COLLECTIVE = re.compile(r"gloo|nccl|collective|(closed|reset) by peer", re.IGNORECASE)


class ClusterError(RuntimeError):
    """The processes of a run did not come together."""


class PeerLost(RuntimeError):
    """A process of this run did not answer."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, as one of them sees it."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None  # None: all devices of the machine (one process per node)
    source: str  # what said so, for log and receipt


# ---- Who says so


def detect(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Cluster | None, list[Problem]]:
    """The cluster this process belongs to, None for a run of one process; and all that is wrong with what was said about it.

    `options` are the command line's "coordinator", "num-processes", "process-id" and "local-devices", "" where not given.
    They go before JAXTRAIN_COORDINATOR, JAXTRAIN_NUM_PROCESSES, JAXTRAIN_PROCESS_ID and JAXTRAIN_LOCAL_DEVICES, each on its
    own. What both leave open comes from a launcher: torchrun's variables, else Slurm's (under srun), else Open MPI's, else
    the index of a Kubernetes Job. One process per node takes all its devices, several take one each.
    """
    reader = _Reader(options, environ)
    cluster = reader.cluster()
    return (None, reader.problems) if reader.problems else (cluster, [])


@dataclasses.dataclass
class _Said:
    """What a launcher says, None where it does not. `devices` is None for all devices of the machine."""

    name: str
    coordinator: str | None
    count: int | None
    index: int | None
    devices: tuple[int, ...] | None


class _Reader:
    """One reading of options and environment, and the problems found on the way."""

    def __init__(self, options: Mapping[str, str], environ: Mapping[str, str]):
        self.environ = environ
        self.problems: list[Problem] = []
        self.keys: dict[str, str] = {}  # field -> the option or variable that gives it
        self.given: dict[str, str] = {}
        for field in FIELDS:
            variable = "JAXTRAIN_" + field.replace("-", "_").upper()
            for key, text in ((f"--{field}", options.get(field, "")), (variable, environ.get(variable, ""))):
                if text.strip():
                    self.keys[field], self.given[field] = key, text.strip()
                    break

    def cluster(self) -> Cluster | None:
        coordinator = self.address(self.keys.get("coordinator", ""), self.given.get("coordinator", ""))
        count = self.number(self.keys.get("num-processes", ""), self.given.get("num-processes", ""), 1)
        index = self.number(self.keys.get("process-id", ""), self.given.get("process-id", ""), 0)
        devices = self.devices()
        whole = all(field in self.given for field in FIELDS[:3])
        # All three by hand say everything: the variables of an allocation around them have nothing to add.
        said = None if whole or count == 1 else self.launcher()
        by_hand = [self.keys[field] for field in FIELDS[:3] if field in self.given]
        sources = by_hand[:1]
        if said is not None:
            sources = [said.name, *by_hand]
            coordinator = said.coordinator if "coordinator" not in self.given else coordinator
            count = said.count if "num-processes" not in self.given else count
            index = said.index if "process-id" not in self.given else index
            devices = said.devices if "local-devices" not in self.given else devices
        if self.problems:
            return None
        if count == 1 or not sources:
            if "local-devices" in self.given:
                rule = "is for runs of several processes, and this is a run of one"
                remedy = "Leave it out; CUDA_VISIBLE_DEVICES chooses the GPUs of a single process."
                self.wrong(self.keys["local-devices"], self.given["local-devices"], rule, remedy)
            return None
        if coordinator is None or count is None or index is None:
            for field, value in zip(FIELDS, (coordinator, count, index), strict=False):
                if value is None:
                    self.missing(field, said)
            return None
        if index >= count:
            rule = f"process {index} cannot be one of {count}: they are counted from 0"
            self.wrong(" and ".join(sources[:1] + by_hand[1:]), None, rule, f"Give each process its own of 0 to {count - 1}.")
            return None
        return Cluster(coordinator, count, index, devices, " and ".join(sources))

    def missing(self, field: str, said: _Said | None) -> None:
        variable = "JAXTRAIN_" + field.replace("-", "_").upper()
        known = " and ".join([*([said.name] if said else []), *(self.keys[f] for f in FIELDS[:3] if f in self.given)])
        what = {
            "coordinator": "where process 0 is",
            "num-processes": "how many processes there are",
            "process-id": "which of them this one is",
        }
        remedy = {
            "coordinator": f"Set {variable}, or --{field}, to HOST:PORT. {ADDRESS_REMEDY}",
            "num-processes": f"Set {variable}, or --{field}, to the same number in every process.",
            "process-id": f"Set {variable}, or --{field}, to 0, 1, 2 and so on.",
        }
        rule = f"is not known from {known}: {what[field]}"
        self.wrong(f"--{field}", None, rule, remedy[field])

    def launcher(self) -> _Said | None:
        """The first launcher that started several processes."""
        for read in (self.torchrun, self.slurm, self.open_mpi, self.kubernetes):
            said = read()
            if said is not None or self.problems:
                return said
        # Half of torchrun's pair, and nobody else's: somebody meant to start several processes.
        rank, world = self.environ.get("RANK", ""), self.environ.get("WORLD_SIZE", "")
        if bool(rank) != bool(world) and world.strip() != "1" and not set(FIELDS[:3]) & set(self.given):
            there, absent = ("RANK", "WORLD_SIZE") if rank else ("WORLD_SIZE", "RANK")
            rule = f"is set without {absent}"
            self.wrong(there, self.environ[there], rule, f"Set both, as torchrun does, or unset {there}.")
        return None

    def torchrun(self) -> _Said | None:
        env = self.environ
        if not (env.get("RANK") and env.get("WORLD_SIZE")):
            return None
        count = self.number("WORLD_SIZE", env["WORLD_SIZE"], 1)
        index = self.number("RANK", env["RANK"], 0)
        if count == 1:
            return _Said("torchrun", None, 1, 0, None)
        return _Said("torchrun", self.master(), count, index, self.local("LOCAL_WORLD_SIZE", "LOCAL_RANK"))

    def slurm(self) -> _Said | None:
        env = self.environ
        if not all(env.get(k) for k in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS")):
            return None  # not under srun: a batch script runs its commands once, whatever it asked for
        count = self.number("SLURM_NTASKS", env["SLURM_NTASKS"], 1)
        if count == 1:
            return _Said("Slurm", None, 1, 0, None)
        index = self.number("SLURM_PROCID", env.get("SLURM_PROCID", ""), 0, needed=True)
        counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or ""
        tasks = [int(n) for n in re.findall(r"(?:^|,)(\d+)", counts)]  # as 8(x2),4
        nodes = node_names(env["SLURM_STEP_NODELIST"])
        if not nodes and not ("coordinator" in self.given and (tasks or "local-devices" in self.given)):
            remedy = "Set JAXTRAIN_COORDINATOR, and JAXTRAIN_LOCAL_DEVICES where a node has several tasks."
            self.wrong("SLURM_STEP_NODELIST", env["SLURM_STEP_NODELIST"], "is no list of nodes that jaxtrain can read", remedy)
        job = self.number("SLURM_JOB_ID", env["SLURM_JOB_ID"], 0)
        # The port that jax would take: another for each job that is on the nodes at the same time.
        coordinator = f"{nodes[0]}:{(job or 0) % 2**12 + 65536 - 2**12}" if nodes else None
        several = max(tasks) > 1 if tasks else (count or 0) > len(nodes)
        devices = None
        if several and "local-devices" not in self.given:
            local = self.number("SLURM_LOCALID", env.get("SLURM_LOCALID", ""), 0, needed=True)
            devices = (local or 0,)
        return _Said("Slurm", coordinator, count, index, devices)

    def open_mpi(self) -> _Said | None:
        env, prefix = self.environ, "OMPI_COMM_WORLD_"
        if not (env.get(prefix + "SIZE") or env.get(prefix + "RANK")):
            return None
        count = self.number(prefix + "SIZE", env.get(prefix + "SIZE", ""), 1, needed=True)
        if count == 1:
            return _Said("Open MPI", None, 1, 0, None)
        index = self.number(prefix + "RANK", env.get(prefix + "RANK", ""), 0, needed=True)
        coordinator = self.master() if env.get("MASTER_ADDR") else None
        return _Said("Open MPI", coordinator, count, index, self.local(prefix + "LOCAL_SIZE", prefix + "LOCAL_RANK"))

    def kubernetes(self) -> _Said | None:
        env = self.environ
        if not (env.get("KUBERNETES_SERVICE_HOST") and env.get("JOB_COMPLETION_INDEX")):
            return None
        if not set(FIELDS[:3]) & set(self.given):
            return None  # an indexed Job of runs that have nothing to do with each other
        return _Said("Kubernetes", None, None, self.number("JOB_COMPLETION_INDEX", env["JOB_COMPLETION_INDEX"], 0), None)

    def master(self) -> str | None:
        """The coordinator's address from MASTER_ADDR and MASTER_PORT, None where it is given otherwise."""
        env = self.environ
        if "coordinator" in self.given:
            return None
        if not env.get("MASTER_ADDR"):
            remedy = f"Set MASTER_ADDR and MASTER_PORT, or JAXTRAIN_COORDINATOR. {ADDRESS_REMEDY}"
            self.wrong("MASTER_ADDR", None, "is not set, and says where process 0 is", remedy)
        port = self.number("MASTER_PORT", env.get("MASTER_PORT", ""), 1, 65535, needed=True)
        if not env.get("MASTER_ADDR") or port is None:
            return None
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1  # torchrun itself listens on MASTER_PORT and tells its processes so
        return self.address("MASTER_ADDR", f"{env['MASTER_ADDR'].strip()}:{port}")

    def local(self, size: str, rank: str) -> tuple[int, ...] | None:
        """The device of one of several processes of a node, None where it has the node for itself."""
        if "local-devices" in self.given or not (self.environ.get(size) or self.environ.get(rank)):
            return None
        processes = self.number(size, self.environ.get(size, ""), 1, needed=True)
        if processes == 1:
            return None
        own = self.number(rank, self.environ.get(rank, ""), 0, (processes or 2**31) - 1, needed=True)
        return (own or 0,)

    def devices(self) -> tuple[int, ...] | None:
        text = self.given.get("local-devices")
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"[0-9]+", part) for part in parts) or len({int(p) for p in parts}) < len(parts):
            rule = "must be different whole numbers with commas between them"
            self.wrong(self.keys["local-devices"], text, rule, "Write 0,1 for the first two devices of the machine.")
            return None
        return tuple(int(part) for part in parts)

    def address(self, key: str, text: str) -> str | None:
        if not text:
            return None
        host, _, port = text.rpartition(":")
        fits = re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+", host, re.ASCII)
        if not fits or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            self.wrong(key, text, "must be HOST:PORT, the port from 1 to 65535", ADDRESS_REMEDY)
            return None
        return text

    def number(self, key: str, text: str, low: int, high: int = 2**31 - 1, *, needed: bool = False) -> int | None:
        text = text.strip()
        if not text:
            if needed:
                remedy = f"Set it, or JAXTRAIN_{', JAXTRAIN_'.join(f.replace('-', '_').upper() for f in FIELDS)}."
                self.wrong(key, None, "is not set, though variables beside it are", remedy)
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            rule = f"must be a whole number from {low}" + (f" to {high}" if high < 2**31 - 1 else "")
            self.wrong(key, text, rule, f"Write {low}, for example.")
            return None
        return int(text)

    def wrong(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.problems.append(Problem(key, value, rule, remedy))


def node_names(text: str) -> list[str]:
    """The machines of a Slurm node list: gpu[01-03,07],login1 -> gpu01, gpu02, gpu03, gpu07, login1. Empty for no such list."""
    names = []
    # Commas inside brackets are ranges' own.
    for entry in re.split(r",(?![^\[\]]*\])", text.strip()):
        if not re.fullmatch(r"([\w.-]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", entry, re.ASCII):
            return []
        parts = [_numbers(part[1:-1]) if part[0] == "[" else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", entry)]
        names += ["".join(pieces) for pieces in itertools.product(*parts)]
    return names


def _numbers(text: str) -> list[str]:
    """01-03,07 -> 01, 02, 03, 07."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


# ---- How they meet


def start(cluster: Cluster, *, init_timeout_s: int = 300, heartbeat_s: int = 100) -> None:
    """Connects this process to the others. Before anything is asked of JAX's devices, in every process, whatever the order.

    `heartbeat_s`: seconds after which jax itself gives up a process that is silent, and aborts the others; `Peers.watch` should
    be much sooner. jax leaves SIGTERM alone.

    Raises ClusterError, naming who is missing or what cannot be reached, where the processes have not come together within
    `init_timeout_s` seconds, and at once where two of them cannot belong to one run.
    """
    # jax aborts a process that cannot connect, and does not say who is missing. So they meet before it comes to that.
    if cluster.num_processes > 1:
        (_receive if cluster.process_id == 0 else _come)(cluster, init_timeout_s)
    import jax

    # Its notifier takes SIGTERM for itself; jaxtrain stops by what a process hears from `Peers`.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        list(cluster.local_device_ids) if cluster.local_device_ids is not None else None,
        cluster_detection_method="deactivate",
        initialization_timeout=init_timeout_s,
        heartbeat_timeout_seconds=heartbeat_s,
    )


def _receive(cluster: Cluster, timeout_s: float) -> None:
    """Process 0 waits at its address for all others, and then sends them on. Raises ClusterError."""
    deadline = time.monotonic() + timeout_s
    here: dict[int, tuple[socket.socket, str]] = {}
    with _bind(cluster, deadline) as server:
        try:
            while missing := [i for i in range(1, cluster.num_processes) if i not in here]:
                try:
                    server.settimeout(max(deadline - time.monotonic(), 0.001))
                    visitor = server.accept()[0]
                except TimeoutError:
                    raise ClusterError(_nobody_came(cluster, missing, timeout_s)) from None
                _welcome(cluster, visitor, here)
                here = {i: guest for i, guest in here.items() if not _hung_up(guest[0])}
        except ClusterError as error:
            for guest, _ in here.values():
                _send(guest, f"no {error}\n")
            raise
    for guest, _ in here.values():
        _send(guest, "go\n")
        guest.close()


def _bind(cluster: Cluster, deadline: float) -> socket.socket:
    port = int(cluster.coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    patience = min(deadline, time.monotonic() + LEAVING_S)
    while True:
        try:
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > patience:
                raise ClusterError(
                    f"process 0 cannot listen at {cluster.coordinator}: {_why(error)}. Another run may use port {port} of "
                    f"this machine: end it, or give all processes another port. The address comes from {cluster.source}."
                ) from None
            time.sleep(0.5)


def _welcome(cluster: Cluster, visitor: socket.socket, here: dict[int, tuple[socket.socket, str]]) -> None:
    words = _line(visitor, 5.0).split(" ", 3)
    if len(words) != 4 or words[0] != HELLO or not all(re.fullmatch(r"[0-9]{1,10}", word) for word in words[1:3]):
        visitor.close()  # a port scan, a health check, a process of another program
        return
    count, index, who = int(words[1]), int(words[2]), words[3]
    refusal = ""
    if count != cluster.num_processes:
        refusal = f"process {index} ({who}) was told of {count} processes, process 0 of {cluster.num_processes}"
    elif index in here and not _hung_up(here[index][0]):
        refusal = f"two processes say that they are process {index}: {here[index][1]}, and {who}"
    elif not 1 <= index < count:
        refusal = f"two processes say that they are process {index}: {_this()}, and {who}"
    if refusal:
        refusal = f"{refusal}. Give all processes the same number, and each its own id; both come from {cluster.source}."
        _send(visitor, f"no {refusal}\n")
        visitor.close()
        raise ClusterError(refusal)
    here[index] = (visitor, who)


def _nobody_came(cluster: Cluster, missing: list[int], timeout_s: float) -> str:
    return (
        f"{_list(missing)} of {cluster.num_processes} did not come to {cluster.coordinator} within {timeout_s:g} s. Look at "
        f"their logs; check that they were started, that they can reach {cluster.coordinator}, that it is process 0's machine "
        f"({socket.gethostname()}), and that no firewall closes the port."
    )


def _come(cluster: Cluster, timeout_s: float) -> None:
    """The others go to process 0 and wait there for the rest. Raises ClusterError."""
    host, _, port = cluster.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    deadline = time.monotonic() + timeout_s + GRACE_S
    while True:
        answer = ""
        try:
            with socket.create_connection(address, timeout=min(5.0, timeout_s)) as door:
                _send(door, f"{HELLO} {cluster.num_processes} {cluster.process_id} {_this()}\n")
                answer = _line(door, max(deadline - time.monotonic(), 0.1), ("go", "no "))
            found = "process 0 waits for others there" if time.monotonic() > deadline else "something else answers there"
        except OSError as error:
            found = _why(error)
        if answer == "go":
            _await_service(address)
            return
        if answer.startswith("no "):
            raise ClusterError(answer.removeprefix("no "))
        if time.monotonic() > deadline:
            raise ClusterError(
                f"process {cluster.process_id} of {cluster.num_processes} did not meet process 0 at {cluster.coordinator} "
                f"within {timeout_s:g} s: {found}. Look at process 0's log; check that it was started, that "
                f"{address[0]} is its machine, and that no firewall closes port {address[1]}. "
                f"The address comes from {cluster.source}."
            )
        time.sleep(0.5)


def _await_service(address: tuple[str, int]) -> None:
    """Until process 0 listens again, as jax's service: jax itself would look once, and then a second later."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            socket.create_connection(address, timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.02)


def _line(connection: socket.socket, timeout_s: float, expected: Sequence[str] = (HELLO,)) -> str:
    """The line that comes within that time, "" where none does, or one that does not begin as expected."""
    until, text = time.monotonic() + timeout_s, ""
    try:
        while not text.endswith("\n"):
            connection.settimeout(max(until - time.monotonic(), 0.001))
            piece = connection.recv(4096).decode(errors="replace")
            text += piece
            if not piece or len(text) > 4096 or not any(e.startswith(text[: len(e)]) for e in expected):
                return ""
    except OSError:
        return ""
    return text.strip()


def _send(connection: socket.socket, text: str) -> None:
    try:
        connection.settimeout(5.0)
        connection.sendall(text.encode())
    except OSError:
        return  # gone; whoever waits for its answer finds out


def _hung_up(connection: socket.socket) -> bool:
    """Whether the other end, which has nothing to say before it is answered, has closed the connection."""
    try:
        connection.setblocking(False)
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _this() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def _list(processes: Sequence[int]) -> str:
    """process 1; processes 1 and 2; processes 1, 2, 3 and 40 more."""
    shown = [str(i) for i in (processes if len(processes) <= 8 else processes[:7])]
    if len(shown) < len(processes):
        shown.append(f"{len(processes) - len(shown)} more")
    return f"process {shown[0]}" if len(shown) == 1 else f"processes {', '.join(shown[:-1])} and {shown[-1]}"


# ---- What they tell each other


class Peers:
    """What the processes of a run tell each other outside the devices, through the store in process 0.

    All of it may be called from any thread. A run of one process has one too, and nothing there waits.
    """

    def __init__(self, process_index: int, count: int, client: Any = None, coordinator: str = ""):
        """`client` is jax's client of the coordination service, `coordinator` the service's HOST:PORT."""
        self.process_index = process_index
        self.count = count
        self._client = client
        self._coordinator = coordinator
        self._rounds: dict[str, int] = {}
        self._agreement = threading.Condition()
        self._reached = 0  # the last step this process may dispatch so far
        self._ceiling: int | None = None  # the same, as told to the others
        self._last: int | None = None  # the last step for all
        self._reason: str | None = None
        self._broken: RuntimeError | None = None
        self._watch: _Watch | None = None
        self._closed = count == 1
        self._hears_of_stop = threading.Thread(target=self._stop_with_the_others, name="peers: stop", daemon=True)
        if count > 1:
            client.key_value_set(f"jaxtrain/who/{process_index}", _this(), True)
            self._hears_of_stop.start()

    @classmethod
    def of_this_run(cls) -> "Peers":
        """From what `start` set up; of one process where it did not.

        A process that ends without `close`, by an exception or sys.exit, tells the others that it has failed; its exit code is
        1, whatever sys.exit was given. `close` and `leave` are the way to another.
        """
        from jax._src import distributed

        state = distributed.global_state
        if state.client is None or state.num_processes == 1:
            return cls(0, 1)
        peers = cls(state.process_id, state.num_processes, state.client, state.coordinator_address or "")
        atexit.register(peers._ended_without_close)  # before jax's own shutdown, which waits for the others
        return peers

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Every process's value, by process index. Waits at most `timeout_s` seconds for the others to call it too.

        A name may be used again: all processes call it equally often. What was said under it before is forgotten.

        Raises PeerLost, naming the processes that did not answer.
        """
        if self.count == 1:
            return [value]
        deadline = time.monotonic() + timeout_s
        turn = self._rounds[name] = self._rounds.get(name, -1) + 1
        self._set(f"gather/{name}/{turn}/{self.process_index}", value)
        values = self._of_all(f"gather/{name}/{turn}", deadline, f"within {timeout_s:g} s ({name})")
        if turn:  # whoever has come to this turn has read the one before
            with contextlib.suppress(RuntimeError):  # process 0 is gone, and what it kept
                self._client.key_value_delete(f"jaxtrain/gather/{name}/{turn - 1}/{self.process_index}")
        return values

    def _set(self, key: str, value: str) -> None:
        """Puts a value into the store, over what may be there. Raises PeerLost where process 0 cannot be reached."""
        try:
            self._client.key_value_set(f"jaxtrain/{key}", value, True)
        except RuntimeError as error:
            raise PeerLost(f"process 0 does not answer: {_first_line(error)}") from error

    def _of_all(self, place: str, deadline: float, when: str) -> list[str]:
        """Every process's value under `place`, waited for until then. Raises PeerLost."""
        try:
            values = []
            for i in range(self.count):
                left_ms = int(1000 * (deadline - time.monotonic()))
                try:
                    values.append(self._client.blocking_key_value_get(f"jaxtrain/{place}/{i}", max(left_ms, 1)))
                except RuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                    break
            else:
                return values
            # Who else is missing, and who came while one was waited for.
            there = {key.rpartition("/")[2]: text for key, text in self._client.key_value_dir_get(f"jaxtrain/{place}")}
        except RuntimeError as error:
            raise PeerLost(f"process 0 does not answer: {_first_line(error)}") from error
        missing = [i for i in range(self.count) if str(i) not in there]
        if missing:
            names = self.who(missing[0]) if len(missing) == 1 else _list(missing)
            raise PeerLost(f"{names} did not answer {when}")
        return [there[str(i)] for i in range(self.count)]

    def who(self, index: int, wait_s: float = 0.0) -> str:
        """A process in words: process 1 (host NAME, pid N). `wait_s`: seconds to wait for a process that has yet to say so."""
        key = f"jaxtrain/who/{index}"
        try:
            said = (
                self._client.blocking_key_value_get(key, int(1000 * wait_s)) if wait_s else self._client.key_value_try_get(key)
            )
        except RuntimeError:
            return f"process {index}"
        return f"process {index} ({said})"

    # Where to stop: every process says which step it has reached, and all go on to the last of these. No loop is asked to do
    # anything for that, because it may be blocked in a step that another process has not begun: this is a thread's work.

    def ask_to_stop(self, why: str) -> None:
        """Has all processes stop after one and the same step, this one included. Asked twice, the first counts.

        Raises PeerLost where process 0 cannot be told.
        """
        if self.count == 1:
            with self._agreement:
                if self._reason is None:
                    self._reason, self._ceiling, self._last = why, self._reached, self._reached
            return
        if self._closed:
            return
        try:
            self._client.key_value_set("jaxtrain/stop/first", why)
        except RuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return
            raise PeerLost(f"process 0 does not answer: {_first_line(error)}") from error
        for i in range(self.count):  # each has a key of its own to wait for, by which it can also be woken to leave
            self._set(f"stop/{i}", why)

    def may_start(self, step: int) -> bool:
        """Whether step `step` (the number of steps done after it) may be dispatched; called before each.

        False means to stop here: all steps before it are dispatched by every process, and neither it nor any later one by any.

        Raises PeerLost, naming the processes that have not said where they are, where it is their turn to.
        """
        with self._agreement:
            if self._ceiling is not None and step > self._ceiling:
                self._agreement.wait_for(lambda: self._last is not None or self._broken is not None, AGREE_S + 30)
                if self._last is None:
                    raise self._broken or PeerLost(f"nobody has said within {AGREE_S:g} s where to stop")
                if step > self._last:
                    return False
            self._reached = step
            return True

    @property
    def stop_reason(self) -> str | None:
        """Why to stop, once this process has heard that somebody asked."""
        return self._reason

    def _stop_with_the_others(self) -> None:
        why = None
        while why is None:
            try:
                why = self._client.blocking_key_value_get(f"jaxtrain/stop/{self.process_index}", int(1000 * HOUR_S))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # process 0 is gone: the watch's business
        if self._closed:
            return
        said = []
        try:
            self._say_how_far(why)
            said = self._of_all("reached", time.monotonic() + AGREE_S, f"within {AGREE_S:g} s (where to stop)")
        except RuntimeError as error:
            self._broken = error
        with self._agreement:
            self._last = max((int(step) for step in said), default=None)
            self._agreement.notify_all()

    def _say_how_far(self, why: str | None) -> None:
        """Tells the others which step this process has reached; from then on it goes no further alone."""
        with self._agreement:
            self._reason = why
            self._ceiling = self._reached if self._ceiling is None else self._ceiling
        self._set(f"reached/{self.process_index}", str(self._ceiling))

    def watch(self, every_s: float, dead_after_s: float, lost: Callable[[str], None]) -> None:
        """From now on, `lost` is called, once and in another thread, with the words for it when a process of this run dies.

        Every process says every `every_s` seconds that it is there; one that has not for `dead_after_s` seconds is dead,
        although it may only be stopped. Process 0 watches the others and tells them; they watch process 0. Where process 0
        is gone, the coordination service with it, jax ends this process 6 s later: `lost` should be done by then.

        Raises ValueError where `dead_after_s` leaves no room for a beat that is late.
        """
        if dead_after_s < 3 * every_s:
            raise ValueError(f"dead_after_s ({dead_after_s:g}) must be at least three times every_s ({every_s:g})")
        if self.count > 1:
            self._watch = _Watch(self, self._client, self._coordinator, every_s, dead_after_s, lost)

    def close(self, failed: str = "") -> None:
        """Says goodbye, so that this process's end is not taken for a death, and ends the watch. Called twice, once counts.

        `failed` says instead that this process cannot go on, and why: the watches of the others hear of it at once. `leave`
        should follow. A collective that failed is more often the end of a peer than this process's own: then the watch is
        given the time to find that one first, and `lost` is called instead.

        Without it, process 0 waits (300 s at most) until all others have said goodbye, and watches them meanwhile: nothing
        works without the store that it holds.
        """
        if self._closed:
            return
        if failed and self._watch and COLLECTIVE.search(failed):
            self._watch.look_around()
        self._closed = True
        atexit.unregister(self._ended_without_close)
        with contextlib.suppress(PeerLost):  # then there is nobody to tell
            self._say_how_far(self._reason)  # the others may yet ask to stop
        if self._watch:
            self._watch.close(failed)
        # Python must not end while a thread is in a call to the store: the process would abort.
        with contextlib.suppress(PeerLost):  # then the call has ended too
            self._set(f"stop/{self.process_index}", "")
        if self._hears_of_stop is not threading.current_thread():
            self._hears_of_stop.join(timeout=5.0)

    def _ended_without_close(self) -> None:
        error = getattr(sys, "last_exc", None)  # one that nobody caught, and Python has shown
        self.close(f"{type(error).__name__}: {_first_line(error)}" if error else "it ended before its work was done")
        leave(1)


def leave(exit_code: int) -> NoReturn:
    """Ends a process of several whose run has failed, at once.

    Python's own way out would wait minutes in jax's shutdown for peers that wait for this process in a collective.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or the reader has gone
    os._exit(exit_code)


class _Watch:
    """The threads behind `Peers.watch`.

    A process says "alive N", with N counting, "left", or "failed WHY" under its own key. Process 0 reads all of them, and puts
    "lost WHO" under its key when one has died; the others read that key alone, so that the work grows with the number of
    processes and not with its square, and all of them name the same culprit.
    """

    def __init__(
        self, peers: Peers, client: Any, address: str, every_s: float, dead_after_s: float, lost: Callable[[str], None]
    ):
        self.peers, self.client, self.address = peers, client, address
        self.every_s, self.dead_after_s, self.lost = every_s, dead_after_s, lost
        self.me = peers.process_index
        self.first = peers.who(0, wait_s=10)  # while it can be asked
        self.heard = 0  # how often process 0 has been heard of
        self.lock = threading.Lock()
        self.reported = False
        self.everyone_left = threading.Event()
        self.quiet = threading.Event()  # no more beats
        self.ending = threading.Event()  # and no more reports
        self.restore_abort = _delay_abort() if self.me else None
        work = [self.beat, self.hold_the_line] if self.me else [self.attend]
        self.threads = [threading.Thread(target=run, name=f"peers: {run.__name__}", daemon=True) for run in work]
        for thread in self.threads:
            thread.start()

    def say(self, text: str) -> None:
        self.client.key_value_set(f"jaxtrain/beat/{self.me}", text, True)

    def report(self, message: str) -> None:
        with self.lock:
            if self.reported or self.ending.is_set():
                return
            self.reported = True
        self.lost(message)

    def attend(self) -> None:
        """Process 0: beats, and looks at the others' beats."""
        silent = dict.fromkeys(range(1, self.peers.count), 0.0)  # seconds of silence of those that have not left
        before: dict[int, str] = {}
        then = time.monotonic()
        for n in itertools.count():
            try:
                self.say(f"alive {n}")
                said = {int(key.rpartition("/")[2]): text for key, text in self.client.key_value_dir_get("jaxtrain/beat/")}
            except RuntimeError:
                return  # its own service has been shut down: this process is leaving
            passed, then = self.passed(then)
            for i in list(silent):
                text = said.get(i, "")
                silent[i] = silent[i] + passed if text == before.get(i, "") else 0.0
                if text == "left":
                    del silent[i]
                elif text.startswith("failed ") or silent[i] > self.dead_after_s:
                    why = f"has failed: {text[7:]}" if text.startswith("failed ") else self.unheard()
                    message = f"{self.peers.who(i)} {why}"
                    self.tell_all(message)
                    self.report(message)
                    return
            before = said
            if not silent:
                self.everyone_left.set()
            if self.quiet.wait(self.every_s):
                return

    def unheard(self) -> str:
        return f"has not been heard of for {self.dead_after_s:g} s"

    def tell_all(self, message: str) -> None:
        """Process 0 stays until the others have read it: with its end, they could name nobody but process 0."""
        self.say(f"lost {message}")
        time.sleep(2.5 * self.every_s)

    def beat(self) -> None:
        """The others: beat, and hear what process 0 says."""
        before = ""
        for n in itertools.count():
            try:
                self.say(f"alive {n}")
                text = self.client.key_value_try_get("jaxtrain/beat/0")
            except RuntimeError:
                text = before  # process 0 has not begun yet, or is gone, which the line notices
            self.heard += text != before
            before = text
            if text.startswith("lost "):
                self.report(text.removeprefix("lost "))
                return
            if self.quiet.wait(self.every_s):
                return

    def hold_the_line(self) -> None:
        """The others: notice at once that process 0 has ended, and in time that it is silent.

        A call to the store shows neither: jax ends the process when the service breaks one off, and one to a machine that is
        stopped does not return. So this is a connection of our own to the port of jax's service. Nothing is said on it; the
        service closes it every minute, and one that lives lets us connect again.
        """
        host, _, port = self.address.rpartition(":")
        pause = min(self.every_s, 1.0)
        line, since, reached = None, 0.0, False  # reached: ever; a service behind a proxy may be there all the same
        silent, heard, then = 0.0, self.heard, time.monotonic()
        while not self.ending.is_set():
            try:
                if line is None:
                    line, since, reached = socket.create_connection((host.strip("[]"), int(port)), timeout=pause), then, True
                closed = not line.recv(4096)
            except TimeoutError:
                closed = False
            except ConnectionRefusedError:
                if reached:
                    self.report(f"{self.first} is gone: nothing answers at {self.address}")
                    return
                closed = True
            except (OSError, ValueError):  # no answer either way, or no address: its silence will tell
                closed = True
            if closed:
                if line is not None:
                    line.close()
                line = None
                self.ending.wait(0.05 if then - since > pause else pause)
            passed, then = self.passed(then)
            silent, heard = (silent + passed if heard == self.heard else 0.0), self.heard
            if silent > self.dead_after_s:
                self.report(f"{self.first} {self.unheard()}")
                return

    def passed(self, then: float) -> tuple[float, float]:
        """(seconds since `then`, now). A pause longer than ours was this process's own, and says nothing about the others."""
        now = time.monotonic()
        return min(now - then, 2 * self.every_s), now

    def look_around(self) -> None:
        """Waits as long as the death of a peer, if there is one, takes to be noticed and reported."""
        time.sleep(self.dead_after_s + 6 * self.every_s)

    def close(self, failed: str) -> None:
        if self.me == 0 and not failed:
            until = time.monotonic() + GOODBYE_S
            while not (self.everyone_left.wait(0.1) or self.reported or time.monotonic() > until):
                continue
        self.quiet.set()
        self.join(self.threads[0])  # so that no beat comes after the last word
        with contextlib.suppress(RuntimeError):  # then process 0 is gone, and there is nobody to tell
            if self.me == 0 and failed:
                self.tell_all(f"{self.first} has failed: {failed}")
            elif self.me:
                self.say(f"failed {failed}" if failed else "left")
        with self.lock:
            self.ending.set()
        self.join(self.threads[-1])
        if self.restore_abort:
            self.restore_abort()

    def join(self, thread: threading.Thread) -> None:
        if thread is not threading.current_thread():  # `lost` may close, too
            thread.join(timeout=2.5 * self.every_s + 2)


def _delay_abort() -> Callable[[], None] | None:
    """Has this process live 6 s longer when it aborts; returns what undoes that. None where something else handles aborts.

    jax aborts the moment it loses its connection to process 0. The handler of SIGABRT is then called with its number, 6, and
    is the C function sleep: enough for a thread of ours to say who is gone, and to leave with the exit code for that. Every
    other abort ends as it always did, 6 s later. No Python runs in the handler, which could wait for ever for the thread
    that aborts.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if before is not None:
        libc.signal(signal.SIGABRT, before)
        return None

    def restore() -> None:
        libc.signal(signal.SIGABRT, None)

    return restore


def _why(error: OSError) -> str:
    """The system's words, without Python's."""
    known = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno or 0) if known else error.strerror or str(error)).lower()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
