"""How the processes of a run come together, before JAX is used."""

import errno
import re
import socket
import time
from collections.abc import Sequence

from jaxtrain.distributed.cluster import Cluster
from jaxtrain.distributed.words import listed, reason, this_process

HELLO = "jaxtrain"  # begins what a process says when it comes to process 0, so that strangers are told apart
LEAVING_S = 30.0  # for an earlier run of the same job, which may still hold the port of process 0
GRACE_S = 5.0  # process 0, who knows best what is wrong, speaks first


class ClusterError(RuntimeError):
    """The processes of a run did not come together."""


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
                    f"process 0 cannot listen at {cluster.coordinator}: {reason(error)}. Another run may use port {port} of "
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
        refusal = f"two processes say that they are process {index}: {this_process()}, and {who}"
    if refusal:
        refusal = f"{refusal}. Give all processes the same number, and each its own id; both come from {cluster.source}."
        _send(visitor, f"no {refusal}\n")
        visitor.close()
        raise ClusterError(refusal)
    here[index] = (visitor, who)


def _nobody_came(cluster: Cluster, missing: list[int], timeout_s: float) -> str:
    return (
        f"{listed(missing)} of {cluster.num_processes} did not come to {cluster.coordinator} within {timeout_s:g} s. Look at "
        f"their logs; check that they were started, that they can reach {cluster.coordinator}, that it is process 0's machine "
        f"({socket.gethostname()}), and that no firewall closes the port."
    )


def _come(cluster: Cluster, timeout_s: float) -> None:
    """The others go to process 0 and wait there for the rest. Raises ClusterError."""
    host, _, port = cluster.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    deadline = time.monotonic() + timeout_s + GRACE_S
    while True:
        answer, began = "", time.monotonic()
        try:
            with socket.create_connection(address, timeout=min(5.0, timeout_s)) as door:
                _send(door, f"{HELLO} {cluster.num_processes} {cluster.process_id} {this_process()}\n")
                answer = _line(door, max(deadline - time.monotonic(), 0.1), ("go", "no "))
            waited = began <= deadline < time.monotonic()  # this try has taken all the time that was left
            found = "process 0 waits for others there" if waited else "something else answers there"
        except OSError as error:
            found = reason(error)
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
