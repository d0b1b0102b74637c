"""Compile many plans at once, each in a Python process of its own, so that a crash of the compiler ends one plan only.

python -m jaxtrain.plan.search.parallel RESULT < job.json        a child; not meant to be called by hand
"""

import ctypes
import dataclasses
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

from jaxtrain import config
from jaxtrain.config import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan, Rates, from_json, rates_from_json, to_json
from jaxtrain.plan.search.cache import Cache, Failure, labelled, write_whole
from jaxtrain.plan.topology import Topology

MAKE = "jaxtrain.plan.make:make_plan"
TIMEOUT_S = 900.0  # of one plan; 8B takes some ten seconds on two cores, and 70B on 1,024 GPUs no longer
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Request:
    """A plan to make. `name` and `overrides` label it. rates: None for those of rates.py."""

    run: RunConfig
    topology: Topology
    name: str = ""
    overrides: tuple[str, ...] = ()
    rates: Rates | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan, or why there is none.

    Attributes:
        kind: planned | cached | failed (planning raised) | crashed | out of memory | out of time | stopped.
    """

    plan: Plan | None
    kind: str
    reason: str = ""
    seconds: float = 0.0


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class _Children:
    """Child processes that plan, each watched by a thread of the caller."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def end(self) -> None:
        """End every child, and start no more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()

    def plan(self, request: Request, plan_one: str, timeout_s: float) -> Outcome:
        """Plan one request in a child, and wait for it."""
        began = time.monotonic()
        job = {
            "config": config.to_dict(request.run),
            "topology": request.topology.name,
            "rates": request.rates and dataclasses.asdict(request.rates),
            "plan_one": plan_one,
        }
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        with tempfile.TemporaryDirectory(prefix="jaxtrain-plan-") as folder:
            result = Path(folder) / "plan.json.gz"
            with self._lock:
                if self._ended:
                    return Outcome(None, "stopped")
                process = subprocess.Popen(
                    [sys.executable, "-m", "jaxtrain.plan.search.parallel", str(result)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C goes to the parent alone, which then ends its children
                )
                self._running.add(process)
            try:
                printed, _ = process.communicate(json.dumps(job).encode(), timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return Outcome(None, "out of time", f"not planned within {timeout_s:g} s", time.monotonic() - began)
            finally:
                with self._lock:
                    self._running.discard(process)
            return _outcome(result, process.returncode, printed, time.monotonic() - began)


def _outcome(result: Path, code: int, printed: bytes, seconds: float) -> Outcome:
    """Return the outcome of a child that has ended. printed: its output, for the reason of a crash."""
    if result.is_file():
        tree = json.loads(gzip.decompress(result.read_bytes()))
        if "failure" in tree:
            return Outcome(None, tree["kind"], tree["failure"], seconds)
        return Outcome(from_json(tree), "planned", "", seconds)
    if code == -signal.SIGKILL:
        return Outcome(None, "out of memory", "killed, as the system does if host memory runs out", seconds)
    lines = printed.decode(errors="replace").strip().splitlines()
    last = f"; its last line: {lines[-1][:300]}" if lines else ""
    ending = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Outcome(None, "crashed", f"the compiler's process {ending}{last}", seconds)


def _from_cache(cache: Cache | None, request: Request, plan_one: str) -> Outcome | None:
    """Return the outcome of an earlier process, or None."""
    if cache is None:
        return None
    key = cache.key(request.run, request.topology, request.rates, plan_one)
    found = cache.get(key)
    if found is None:
        return None
    if isinstance(found, Failure):
        return Outcome(None, "failed", f"{found.reason} (as before; delete {cache.path(key)} to try again)")
    return Outcome(labelled(found, request.name, request.overrides), "cached")


def _keep(cache: Cache | None, request: Request, outcome: Outcome, plan_one: str) -> Outcome:
    """Put plans, and errors that planning raised, into the cache. Return the outcome with its label."""
    found = outcome.plan or (Failure(outcome.reason) if outcome.kind == "failed" else None)
    if cache is not None and found is not None:
        cache.put(cache.key(request.run, request.topology, request.rates, plan_one), found)
    if outcome.plan is None:
        return outcome
    return dataclasses.replace(outcome, plan=labelled(outcome.plan, request.name, request.overrides))


def plan_each(
    following: Callable[[], tuple[Any, Request] | None],
    on_done: Callable[[Any, Outcome], None],
    *,
    jobs: int = 0,
    deadline: float = float("inf"),
    cache: Cache | None = None,
    plan_one: str = MAKE,
    timeout_s: float = TIMEOUT_S,
) -> bool:
    """Plan one request after the other, `jobs` at a time, from the cache if it is there.

    Args:
        following: return the next request and its id, or None if there is none for now. Called again after each outcome.
        on_done: called with the id and the outcome of each.
        deadline: value of time.monotonic() at which running compiles are ended.
        plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.

    Returns:
        whether it ended before the deadline.
    """
    jobs = jobs or cores()
    running: dict[futures.Future[Outcome], tuple[Any, Request]] = {}
    children = _Children()
    with futures.ThreadPoolExecutor(jobs) as threads:
        try:
            while time.monotonic() < deadline:
                while len(running) < jobs and (item := following()):
                    ident, request = item
                    if known := _from_cache(cache, request, plan_one):
                        on_done(ident, known)
                    else:
                        running[threads.submit(children.plan, request, plan_one, timeout_s)] = item
                if not running:
                    return True
                for future in _wait(running, min(1.0, deadline - time.monotonic())):
                    ident, request = running.pop(future)
                    on_done(ident, _keep(cache, request, future.result(), plan_one))
            return False
        finally:
            children.end()


def _wait(running: Iterable[futures.Future[Outcome]], seconds: float) -> Iterable[futures.Future[Outcome]]:
    """Return the outcomes that are there, as soon as there is one, at the latest after `seconds`."""
    return futures.wait(running, max(0.0, seconds), futures.FIRST_COMPLETED).done


def plan_many(
    requests: dict[Any, Request],
    *,
    jobs: int = 0,
    budget_s: float = 0.0,
    cache: Cache | None = None,
    plan_one: str = MAKE,
    timeout_s: float = TIMEOUT_S,
    on_done: Callable[[Any, Outcome], None] = lambda ident, outcome: None,
) -> dict[Any, Outcome]:
    """Return the plans of all requests, by their ids.

    budget_s: seconds for all of them, after which the rest have the kind "stopped"; 0: no limit. Others as for `plan_each`.
    """
    found: dict[Any, Outcome] = {}
    todo = iter(requests.items())

    def done(ident: Any, outcome: Outcome) -> None:
        found[ident] = outcome
        on_done(ident, outcome)

    deadline = time.monotonic() + (budget_s or float("inf"))
    how = {"jobs": jobs, "deadline": deadline, "cache": cache, "plan_one": plan_one, "timeout_s": timeout_s}
    plan_each(lambda: next(todo, None), done, **how)
    for ident in requests.keys() - found.keys():
        done(ident, Outcome(None, "stopped", f"the budget of {budget_s:g} s was spent"))
    return {ident: found[ident] for ident in requests}


def call(plan_one: str, run: RunConfig, topology: Topology, rates: Rates | None) -> Plan:
    """Call "package.module:function"."""
    module, _, name = plan_one.partition(":")
    extra: dict[str, Any] = {} if rates is None else {"rates": rates}
    return getattr(importlib.import_module(module), name)(run, topology, **extra)


def child(result: Path, job: dict[str, Any]) -> int:
    """Make one plan, and write it or its error to `result`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Path("/proc/self/oom_score_adj").write_text("1000")  # if host memory runs out, the system ends a compile first
    run, problems = config.from_dict(job["config"])
    if problems:
        raise config.ConfigError(problems)
    rates = rates_from_json(job["rates"]) if job["rates"] else None
    try:
        tree = to_json(call(job["plan_one"], run, machines.parse(job["topology"]), rates))
    # Every error is the outcome of this plan, and goes to the parent.
    except Exception as error:
        traceback.print_exc()
        tree = {"kind": _kind(error), "failure": f"{type(error).__name__}: {first_lines(str(error))}"}
    write_whole(result, gzip.compress(json.dumps(tree).encode(), 1))
    return 0


def _kind(error: Exception) -> str:
    """Return the kind of outcome. Only "failed" is kept: a full disk or too little memory may pass."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return "crashed" if isinstance(error, OSError) else "failed"


def first_lines(text: str, most: int = 400) -> str:
    """Return the beginning of a long error, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[:most] + "..."


if __name__ == "__main__":
    sys.exit(child(Path(sys.argv[1]), json.load(sys.stdin)))
