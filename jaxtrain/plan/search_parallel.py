"""Compile many plans at once, each in a separate Python process, so that a crash of the compiler loses only one plan.

`concurrent.futures` is unsuitable: if the system kills one process for its memory, the whole pool ends. A pool that spawns its
processes also runs the user's script again in each of them.
"""

import contextlib
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config import own_parts
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import ConfigError
from jaxtrain.metrics.files import write_atomic
from jaxtrain.plan.search_cache import PlanCache, PlanOutcome, Request

MAKE = "jaxtrain.plan.make:make_plan"
TIMEOUT_S = 900.0  # time limit of one plan; 8B takes some ten seconds on two cores, as does 70B on 1,024 GPUs
POLL_S = 0.1

# Program of a child process. Before large imports, it sets that the kernel kills it when its parent ends.
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
BEGIN = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[2]):  # the parent ended before the call
    sys.exit(1)
sys.path[:] = sys.argv[3:]  # as in the parent, whose own modules the plan may need
from {__name__} import work
work(sys.argv[1])
"""


class Child:
    """A process that makes one plan."""

    def __init__(self, request: Request, plan_one: str, timeout_s: float):
        self._timeout_s, self._began = timeout_s, time.monotonic()
        self._temporary = tempfile.TemporaryDirectory(prefix="jaxtrain-plan-")
        self._folder = Path(self._temporary.name)
        (self._folder / "request").write_bytes(pickle.dumps((request, plan_one)))
        path = [str(Path(__file__).resolve().parents[2]), *(os.path.abspath(folder) for folder in sys.path)]
        with (self._folder / "printed").open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BEGIN, self._temporary.name, str(os.getpid()), *path],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                start_new_session=True,  # Ctrl-C interrupts only the parent, which then ends its children
            )

    def end(self) -> None:
        """Kill the process if it still runs, and delete its files."""
        self._process.kill()
        self._process.wait()
        self._temporary.cleanup()

    def outcome(self) -> PlanOutcome | None:
        """Return the outcome; None while the process runs within its time limit."""
        code = self._process.poll()
        if code is None:
            late = time.monotonic() - self._began > self._timeout_s
            return PlanOutcome(None, "out of time", f"not planned within {duration(self._timeout_s)}") if late else None
        if (result := self._folder / "outcome").exists():
            return pickle.loads(result.read_bytes())
        if code == -signal.SIGKILL:
            return PlanOutcome(None, "out of memory", "killed, as the system does if host memory runs out")
        lines = (self._folder / "printed").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f"; its last line: {lines[-1][:300]}" if lines else ""
        ending = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return PlanOutcome(None, "crashed", f"the compiler's process {ending}{last}")


def work(folder: str) -> None:
    """Make the plan of a `Child` in its own process. folder: the child's folder, with the request."""
    with contextlib.suppress(OSError):  # some containers mount /proc read-only
        # If host memory runs out, the kernel kills a compile first.
        Path("/proc/self/oom_score_adj").write_bytes(b"1000")
    request, plan_one = pickle.loads((Path(folder) / "request").read_bytes())
    try:
        plan = pkgutil.resolve_name(plan_one)(request.run, request.topology, rates=request.rates)
        outcome = PlanOutcome(request.label(plan), "planned")
    # Every error is returned to the parent as the outcome of this plan.
    except Exception as error:
        traceback.print_exc()
        user_problem = own_parts.problem_of(error)
        problems = (user_problem,) if user_problem else tuple(error.problems) if isinstance(error, ConfigError) else ()
        reason = "; ".join(map(str, problems)) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome = PlanOutcome(
            None,
            "refused" if problems else _error_kind(error),
            reason if len(reason) <= 400 else reason[:400] + "...",
            problems,
        )
    write_atomic(Path(folder) / "outcome", pickle.dumps(outcome))


def _error_kind(error: Exception) -> str:
    """Return the kind of outcome of an error. Only "failed" is cached, since a full disk or full memory may be temporary."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return "crashed" if isinstance(error, OSError) else "failed"


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. An interrupt inside Popen would leave a process that no caller can end."""
    if threading.current_thread() is not threading.main_thread():  # Python interrupts the main thread only
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def plan_many[Id](
    requests: dict[Id, Request],
    *,
    jobs: int = 0,
    budget_s: float = 0.0,
    cache: PlanCache | None = None,
    plan_one: str = MAKE,
    timeout_s: float = TIMEOUT_S,
    on_start: Callable[[Id], None] = lambda ident: None,
    on_done: Callable[[Id, PlanOutcome], None] = lambda ident, outcome: None,
) -> dict[Id, PlanOutcome]:
    """Plan the requests that are not in the cache, `jobs` at a time. Return id -> outcome of each request.

    Args:
        jobs: number of compiles that run at the same time; 0: the number of cores.
        budget_s: seconds for all requests; 0: no limit. Requests without a plan by then have an outcome of kind "stopped".
        plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.
        on_start: called with the id of each request that is not in the cache, when its compile starts.
        on_done: called with (id, outcome) of each request when it is done.
    """
    deadline = time.monotonic() + (budget_s or float("inf"))
    todo, running, outcomes = dict(requests), {}, {}

    def finish(ident: Id, outcome: PlanOutcome) -> None:
        outcomes[ident] = outcome
        on_done(ident, outcome)

    try:
        while (todo or running) and time.monotonic() < deadline:
            while todo and len(running) < (jobs or len(os.sched_getaffinity(0))):
                ident, request = next(iter(todo.items()))
                del todo[ident]
                if cached := cache and cache.get(request, plan_one):
                    finish(ident, cached)
                    continue
                on_start(ident)
                with _delayed_interrupt():
                    running[Child(request, plan_one, timeout_s)] = ident
            time.sleep(POLL_S if running else 0.0)
            for child, outcome in [(child, outcome) for child in running if (outcome := child.outcome())]:
                child.end()
                ident = running.pop(child)
                if cache:
                    cache.put(requests[ident], plan_one, outcome)
                finish(ident, outcome)
    finally:
        for child in running:
            child.end()
    for ident in [*running.values(), *todo]:
        finish(ident, PlanOutcome(None, "stopped", f"the budget of {duration(budget_s)} was spent"))
    return outcomes
