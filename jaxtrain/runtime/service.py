"""Start JAX's coordination service and connect the processes of a run to it."""

import contextlib
import ctypes
import itertools
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from jaxtrain.runtime.cluster import Cluster
from jaxtrain.runtime.words import error_text, this_process

HEARTBEAT_S = 15  # A process without a heartbeat for this long counts as lost.
PORT_S = 30.0  # An earlier attempt of the same job may still hold process 0's port for this long.
LEAVE_S = 1.0  # Process 0 ends this much after the others: its end would abort them.
MARGIN_S = 30  # JAX's own timeout at the start, which aborts the process, comes this much later.


class ClusterError(RuntimeError):
    """The processes of a run could not connect to each other."""


def connect(cluster: Cluster, *, init_timeout_s: int = 300) -> None:
    """Connect this process to the other processes of the run. Call it before JAX's devices are used.

    The tasks of the service are "recoverable": if a process is lost, JAX does not abort the other processes. `Peers.watch`
    reports the lost process instead.

    Args:
      init_timeout_s: seconds until all processes must be connected.

    Raises:
      ClusterError: the processes are not all connected in time, process 0's port is in use, or `num_processes` differs between
        processes.
    """
    import jax
    from jax._src import distributed  # its client has no public name

    if cluster.process_id == 0:
        _await_free_port(cluster)
    # JAX's notifier would take over SIGTERM; `Peers` agrees on the last step instead, for every reason to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)
    _delay_abort()
    failures: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.num_processes,
                cluster.process_id,
                list(cluster.local_device_ids) if cluster.local_device_ids is not None else None,
                cluster_detection_method="deactivate",
                initialization_timeout=init_timeout_s + MARGIN_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
            )
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    # In a thread, because JAX neither returns nor raises when its timeout is over: it aborts the process.
    thread = threading.Thread(target=initialize, name="jax.distributed.initialize", daemon=True)
    thread.start()
    thread.join(init_timeout_s)
    if thread.is_alive():
        raise ClusterError(
            f"process {cluster.process_id}: not all {cluster.num_processes} processes connected to {cluster.coordinator} "
            f"within {init_timeout_s} s. Fix: start the process without this message in its log, give each an id of its own, "
            f"and let it reach that address through any firewall. The address comes from {cluster.source}."
        )
    if failures:
        failure = f"process {cluster.process_id} cannot connect to {cluster.coordinator}: {failures[0]}"
        raise ClusterError(failure) from failures[0]
    client: Any = distributed.global_state.client
    try:
        client.key_value_set(f"jaxtrain/who/{cluster.process_id}", this_process())
        if cluster.process_id == 0:
            client.key_value_set("jaxtrain/count", str(cluster.num_processes))
        count = int(client.blocking_key_value_get("jaxtrain/count", 1000 * init_timeout_s))
    except RuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            failure = f"process {cluster.process_id} was started again ({this_process()}), so its earlier attempt is lost"
            with contextlib.suppress(RuntimeError):
                append_news(client, "failed", failure)  # the others would notice it later, if at all: this one sends heartbeats
            raise ClusterError(f"{failure}. The other processes end too, to be started again") from error
        failure = f"process {cluster.process_id} has lost process 0 at {cluster.coordinator} right after it connected: {error}"
        raise ClusterError(failure) from error
    # JAX does not compare the counts, and a process with a higher one would wait for processes that do not exist.
    if count != cluster.num_processes:
        raise ClusterError(
            f"process {cluster.process_id} was started as one of {cluster.num_processes} processes, process 0 as one of "
            f"{count}. Fix: give all processes the same count. It comes from {cluster.source}."
        )


def append_news(client: Any, kind: str, text: str, first: int = 0) -> None:
    """Append [kind, text] to the news (peers.py). first: an entry that may be free. Raises RuntimeError without process 0."""
    for number in itertools.count(first):
        try:
            client.key_value_set(f"jaxtrain/news/{number}", json.dumps([kind, text]))
            return
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise


def _await_free_port(cluster: Cluster) -> None:
    """Wait until no other program listens on process 0's port. Raises ClusterError after PORT_S.

    JAX does not check the port. If another program has the port, JAX crashes. If another run has the port, JAX shares it with
    that run.
    """
    port = int(cluster.coordinator.rpartition(":")[2])
    dual_stack = socket.has_dualstack_ipv6()
    deadline = time.monotonic() + PORT_S
    while True:
        try:
            family = socket.AF_INET6 if dual_stack else socket.AF_INET
            socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"process 0 cannot listen at {cluster.coordinator}: {error_text(error)}. Fix: end the other program on "
                    f"port {port}, or give all processes another port. The address comes from {cluster.source}."
                ) from None
            time.sleep(0.5)


def _delay_abort() -> None:
    """Delay the end of this process by 6 s after an abort.

    JAX aborts this process when it loses the connection to process 0. The handler of SIGABRT is C's sleep(); its argument, the
    signal's number 6, is the delay in seconds. In this time, the threads of `Peers` report the loss of process 0, and the run
    exits with 75. Every other abort also ends the process 6 s later. No Python runs in the handler, because the aborting
    thread may hold the GIL.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if before is not None:  # another handler, as faulthandler's, stays
        libc.signal(signal.SIGABRT, before)


def is_aborting() -> bool:
    """Return whether a thread of this process is in the handler that `_delay_abort` sets.

    Linux blocks SIGABRT in a thread while the handler runs there. Threads of libraries that block every signal do not count.
    """
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("SigBlk:"))
            blocked = int(line.split()[1], 16)
            if blocked >> (signal.SIGABRT - 1) & 1 and not blocked >> (signal.SIGTERM - 1) & 1:
                return True
    return False
