"""Many plans at once: each in a Python process of its own, watched, and stopped where it takes too much time or memory.

A compile that crashes takes its process with it and nothing else; what it said is the reason that is reported.

    python -m jaxtrain.plan.search.parallel RESULT < job.json        the child; not meant to be called by hand
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
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from jaxtrain import config
from jaxtrain.config import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan, Rates, from_json, rates_from_json, to_json
from jaxtrain.plan.search.cache import Cache, Failure, labelled, write_whole
from jaxtrain.plan.topology import Topology

MAKE = "jaxtrain.plan.make:make_plan"
TIMEOUT_S = 900.0  # for one plan; 8B takes some ten seconds on two cores, and 70B on 1,024 GPUs no longer
HOST_RESERVE_GIB = 0.5  # of the host's memory, left free for everything else
POLL_S = 0.05
GIB = 2**30
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Request:
    """A plan to make. `name` and `overrides` are how the plan will say it was asked for."""

    run: RunConfig
    topology: Topology
    name: str = ""
    overrides: tuple[str, ...] = ()
    rates: Rates | None = None  # None: those of rates.py


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan, or why there is none."""

    plan: Plan | None
    kind: str  # planned | cached | failed (planning raised) | crashed | out of memory | out of time | stopped
    reason: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class _Child:
    process: subprocess.Popen[bytes]
    result: Path
    errors: Path
    started: float
    peak_gib: float = 0.0


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0))


def free_gib() -> float:
    """Memory of this machine, or of the container that limits it, that is still to be had."""
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(known["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free / GIB


class Pool:
    """Up to `jobs` children at a time. A context manager: none outlives it.

    The largest child is stopped when the host has next to no memory left.
    """

    def __init__(self, jobs: int = 0, *, plan_one: str = MAKE, timeout_s: float = TIMEOUT_S):
        self.jobs = jobs or cores()
        self._plan_one, self._timeout_s = plan_one, timeout_s
        self._children: dict[Any, _Child] = {}
        self._count = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxtrain-plans-")
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._folder.cleanup()

    @property
    def running(self) -> tuple[Any, ...]:
        """Ids of the requests under way."""
        return tuple(self._children)

    @property
    def room(self) -> bool:
        return len(self._children) < self.jobs

    def start(self, ident: Any, request: Request) -> None:
        """Starts a child for this request; `wait` returns its outcome under `ident`."""
        self._count += 1
        result, errors = (Path(self._folder.name) / f"{self._count}.{end}" for end in ("json.gz", "err"))
        job = {
            "config": config.to_dict(request.run),
            "topology": request.topology.name,
            "rates": request.rates and dataclasses.asdict(request.rates),
            "plan_one": self._plan_one,
        }
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        with errors.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxtrain.plan.search.parallel", str(result)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is the parent's to hear, which stops the children in its own order
            )
        if process.stdin is None:
            raise RuntimeError("the child was started without a pipe")
        self._children[ident] = _Child(process, result, errors, time.monotonic())
        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(job).encode())
        except BrokenPipeError:
            pass  # it is dead already, and `wait` finds out of what

    def wait(self, seconds: float) -> list[tuple[Any, Outcome]]:
        """Outcomes that came in, at the latest after so many seconds; children over their limits are stopped on the way."""
        until = time.monotonic() + seconds
        while True:
            done = [(ident, outcome) for ident, child in list(self._children.items()) if (outcome := self._look(child))]
            done += self._spare_host([ident for ident, _ in done])
            for ident, _ in done:
                del self._children[ident]
            if done or not self._children or time.monotonic() >= until:
                return done
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))

    def stop(self) -> None:
        """Ends every child."""
        for child in self._children.values():
            _kill(child)
        self._children.clear()

    def _look(self, child: _Child) -> Outcome | None:
        """The outcome of a child that has ended, or that is ended here for a limit of its own."""
        took = time.monotonic() - child.started
        if child.process.poll() is None:
            child.peak_gib = max(child.peak_gib, _resident_gib(child.process.pid))
            if took > self._timeout_s:
                _kill(child)
                return Outcome(None, "out of time", f"not planned within {self._timeout_s:g} s", took)
            return None
        code = child.process.returncode
        if child.result.is_file():
            tree = json.loads(gzip.decompress(child.result.read_bytes()))
            if "failure" in tree:
                return Outcome(None, tree["kind"], tree["failure"], took)
            return Outcome(from_json(tree), "planned", "", took)
        said = child.errors.read_text(errors="replace").strip().splitlines()
        last = f"; its last words: {said[-1][:300]}" if said else ""
        if code == -signal.SIGKILL:
            reason = f"killed, as the system does where memory runs out, at {child.peak_gib:.1f} GiB of host memory"
            return Outcome(None, "out of memory", reason, took)
        what = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(None, "crashed", f"the compiler's process {what}{last}", took)

    def _spare_host(self, done: list[Any]) -> list[tuple[Any, Outcome]]:
        """Where the host runs out of memory, the largest child makes room before the system picks a victim."""
        live = {ident: child for ident, child in self._children.items() if ident not in done}
        if not live or (free := free_gib()) > HOST_RESERVE_GIB:
            return []
        ident, child = max(live.items(), key=lambda item: item[1].peak_gib)
        _kill(child)
        reason = f"compiling took {child.peak_gib:.1f} GiB of host memory, and {free:.1f} GiB were left"
        return [(ident, Outcome(None, "out of memory", reason, time.monotonic() - child.started))]


def _kill(child: _Child) -> None:
    child.process.kill()
    child.process.wait()


def _resident_gib(pid: int) -> float:
    """0 for a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kib = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
    return kib[0] * 1024 / GIB if kib else 0.0


def from_cache(cache: Cache | None, request: Request, plan_one: str = MAKE) -> Outcome | None:
    """What an earlier process found; None where nothing is kept."""
    if cache is None:
        return None
    key = cache.key(request.run, request.topology, request.rates, plan_one)
    found = cache.get(key)
    if found is None:
        return None
    if isinstance(found, Failure):
        return Outcome(None, "failed", f"{found.reason} (as before; delete {cache.path(key)} to try again)")
    return Outcome(labelled(found, request.name, request.overrides), "cached")


def keep(cache: Cache | None, request: Request, outcome: Outcome, plan_one: str = MAKE) -> Outcome:
    """Puts into the cache what would come out the same again: plans, and what planning raised. Returns it under its name."""
    found = outcome.plan or (Failure(outcome.reason) if outcome.kind == "failed" else None)
    if cache is not None and found is not None:
        cache.put(cache.key(request.run, request.topology, request.rates, plan_one), found)
    if outcome.plan is None:
        return outcome
    return dataclasses.replace(outcome, plan=labelled(outcome.plan, request.name, request.overrides))


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
    """Plans of all requests, by their ids: from the cache, else from `jobs` (0: as many as cores) children at a time.

    `budget_s` bounds the whole (0: no bound): what is not planned by then has the kind "stopped". `plan_one` is
    "package.module:function" of (run, topology, rates=...) -> Plan. `on_done` hears of each as it comes in.
    """
    deadline = time.monotonic() + (budget_s or float("inf"))
    found: dict[Any, Outcome] = {}

    def done(ident: Any, outcome: Outcome) -> None:
        found[ident] = outcome
        on_done(ident, outcome)

    todo = []
    for ident, request in requests.items():
        known = from_cache(cache, request, plan_one)
        if known is None:
            todo.append(ident)
        else:
            done(ident, known)
    with Pool(jobs, plan_one=plan_one, timeout_s=timeout_s) as pool:
        while (todo or pool.running) and time.monotonic() < deadline:
            while todo and pool.room:
                pool.start(todo[0], requests[todo.pop(0)])
            for ident, outcome in pool.wait(min(5.0, deadline - time.monotonic())):
                done(ident, keep(cache, requests[ident], outcome, plan_one))
        stopped = Outcome(None, "stopped", f"the budget of {budget_s:g} s was spent")
        for ident in (*pool.running, *todo):
            done(ident, stopped)
    return {ident: found[ident] for ident in requests}


def call(plan_one: str, run: RunConfig, topology: Topology, rates: Rates | None) -> Plan:
    """Runs "package.module:function"."""
    module, _, name = plan_one.partition(":")
    extra: dict[str, Any] = {} if rates is None else {"rates": rates}
    return getattr(importlib.import_module(module), name)(run, topology, **extra)


def child(result: Path, job: dict[str, Any]) -> int:
    """Makes one plan and writes it, or what was raised, to `result`."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    run, problems = config.from_dict(job["config"])
    if problems:
        raise config.ConfigError(problems)
    rates = rates_from_json(job["rates"]) if job["rates"] else None
    try:
        tree = to_json(call(job["plan_one"], run, machines.parse(job["topology"]), rates))
    # Whatever planning raises is this candidate's outcome, and goes to whoever asked for it.
    except Exception as error:
        traceback.print_exc()
        tree = {"kind": _kind(error), "failure": f"{type(error).__name__}: {first_lines(str(error))}"}
    write_whole(result, gzip.compress(json.dumps(tree).encode(), 1))
    return 0


def _kind(error: Exception) -> str:
    """Of an outcome. Only what "failed" would fail again, and is kept; a full disk or too little memory may pass."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return "crashed" if isinstance(error, OSError) else "failed"


def first_lines(text: str, most: int = 400) -> str:
    """The beginning of a long error, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[:most] + "..."


if __name__ == "__main__":
    sys.exit(child(Path(sys.argv[1]), json.load(sys.stdin)))
