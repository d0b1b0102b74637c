"""A training run, from its config to its exit code. `train_attempt` has the main sequence of an attempt.

`run` is for Python programs and notebooks. The command line (main.py) reports mistakes before jax is imported, then calls
`attempt`. Checks of data, devices, checkpoints, shapes and shardings come first. If a check refuses the run, no file is
written. The step is compiled next, and device memory is allocated only if the compiled step fits.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
from rich.filesize import decimal

from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.checkpoint.storage import free_bytes
from jaxtrain.config import environment, hardware, installed, own_parts
from jaxtrain.config.commands import spelled, training
from jaxtrain.config.launch import Launch, variables
from jaxtrain.config.schema import ConfigError, Problem, RunConfig, config_sha256, to_dict
from jaxtrain.data import text_format
from jaxtrain.data.loading import resolve_with_epochs
from jaxtrain.data.tokenfile import TokenFileError
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import goodput, samples
from jaxtrain.metrics.files import MetricsError, NotWritten
from jaxtrain.metrics.goodput import Ledger
from jaxtrain.metrics.gpu_monitor import Monitor
from jaxtrain.metrics.progress import Console
from jaxtrain.metrics.receipt import Receipt
from jaxtrain.metrics.trackers import TrackerError, open_trackers
from jaxtrain.plan.expect import Watch
from jaxtrain.runtime.distributed import PeerLost, Peers, detect
from jaxtrain.runtime.provenance import device_facts
from jaxtrain.runtime.shared import find_unshared
from jaxtrain.runtime.signals import Stop
from jaxtrain.runtime.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.runtime.timelimit import TimeLimit, forbid_restart, limit_s
from jaxtrain.runtime.variables import PREFLIGHT, RESTART
from jaxtrain.runtime.watchdog import Watchdog, parse_budgets
from jaxtrain.runtime.words import first_line
from jaxtrain.step import state
from jaxtrain.step.compiler import KernelNotBuilt
from jaxtrain.step.memory import OutOfMemory, check_free_memory, out_of_memory_explained
from jaxtrain.step.validate import validate
from jaxtrain.step.validate_places import remote
from jaxtrain.train import references
from jaxtrain.train.corruption import Corrupted
from jaxtrain.train.divergence import Diverged, explain
from jaxtrain.train.evaluate import SampleWriter
from jaxtrain.train.initial_state import BadInit, Restored, choose_start, continue_sources, restore
from jaxtrain.train.loop import Loop
from jaxtrain.train.references import META, References
from jaxtrain.train.saver import Saver
from jaxtrain.train.services import Services
from jaxtrain.train.setup import Setup, check_setup, compile_steps, expected_times, open_checkpoints, resized
from jaxtrain.train.step_log import StepLog
from jaxtrain.train.summary import print_summary
from jaxtrain.train.timing import StartTimes, process_age_s

if TYPE_CHECKING:
    from etils import epath

DONE, FAILED, REFUSED, AGAIN, DIVERGED, HUNG, INTERRUPTED = 0, 1, 2, 75, 76, 124, 130  # exit codes
AGREE_S = 600.0  # timeout of processes that wait for each other at the start


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run, or of one attempt: exit code, reason, steps, metrics and checkpoints."""

    exit_code: int  # as that of the command: 0 done; 75 or 130 stopped by a signal, and saved
    reason: str  # in words, as in receipt.json
    step: int  # optimizer steps done
    metrics: dict[str, Any]  # the newest train line of metrics.jsonl; empty if there is none
    checkpoints: "epath.Path"  # the folder of the checkpoints, or its address in a bucket
    error: Exception | None = None  # the exception that ended it; `run` raises it


def run(
    config: ml_collections.ConfigDict | RunConfig | Mapping[str, Any],
    workdir: str | os.PathLike[str],
    notes: Sequence[str] = (),
) -> Result:
    """Train in this process, as the command line does: check everything, then resume from `workdir` or start a new run.

    If the call is in the main thread, signals (Ctrl-C, an interrupted notebook) end the run with a save. After this call, the
    whole process uses XLA's compile cache at `paths.cache`.

    Args:
      config: the result of a config file's `get_config` (start from `config.default_config()`). JAX may have been imported
        before, but nothing may have been computed on GPUs: JAX allocates GPU memory (`train.memory_fraction`) when it first
        uses the GPUs.
      notes: first lines of the log, such as those of `loading.load`.

    Raises ConfigError, with all problems of the config, before anything is started or written. Raises Diverged, OutOfMemory,
    CheckpointError, MetricsError, or any other exception that ended the run.
    """
    asked, problems, fitted = resolve_with_epochs(to_dict(config) if isinstance(config, RunConfig) else config)
    folder, devices = Path(workdir).expanduser(), hardware.probe()
    problems += [*remote("workdir", os.fspath(workdir)), *validate(asked, devices, folder), *check_alone()]
    if problems:
        raise ConfigError(list({str(p): p for p in problems}.values()))
    overlay, _ = environment.overlay(asked, devices, os.environ)
    set_environment(overlay)
    start_jax(devices)
    result = attempt(asked, folder, Launch("python", "", (), (), (*notes, *fitted)), overlay)
    if result.error is not None:
        raise result.error
    return result


def check_alone() -> list[Problem]:
    """Return the problems of a launcher's variables that describe several processes, if this program has not connected them."""
    if Peers.connected():
        return []
    cluster, problems = detect({}, os.environ)
    if cluster is not None:
        rule = f"{cluster.source} started {cluster.num_processes} processes, and each would train alone in this program"
        remedy = "Start python -m jaxtrain.main in their place, or set JAXTRAIN_NUM_PROCESSES=1 to train in each alone."
        problems = [Problem("processes", None, rule, remedy)]
    return problems


def attempt(
    run: RunConfig, workdir: Path, launch: Launch, overlay: environment.Overlay | None = None, *, own_process: bool = False
) -> Result:
    """Make one attempt at a run. Call it after validate.validate found no problems and JAX was started.

    Args:
      overlay: the environment that was set for the run, for log and receipt.
      own_process: the process exists for this run alone. A signal before the first step, the watchdog, and the loss of another
          process of the run may then end this process at once.
    """
    with contextlib.ExitStack() as stack:
        ending = Ending()
        budgets = parse_budgets(run.train.timeouts)[0] if own_process else {}
        watchdog = Watchdog(budgets, workdir, ended=ending.hung, process_index=jax.process_index())
        stack.enter_context(watchdog)
        stack.enter_context(watchdog.phase("startup"))
        peers = ending.peers = watchdog.peers = Peers.of_this_run()
        if own_process:
            peers.watch(ending.lost_process)
        try:
            result = train_attempt(run, workdir, launch, overlay or environment.Overlay(), own_process, watchdog, peers, ending)
        except PeerLost as error:
            if own_process:
                ending.lost_process(str(error))
            raise
        except BaseException as error:
            peers.close(f"{type(error).__name__}: {first_line(error)}", refused=isinstance(error, ConfigError))
            raise
        ending.code, ending.over = result.exit_code, True  # from here on another process's end does not change the exit code
        # All processes raise these together, so none reports itself as failed.
        alike = isinstance(result.error, CheckpointError | Corrupted | SharedRefusal)
        alike |= isinstance(result.error, BadInit) and result.error.alike
        failed = result.reason if result.exit_code in (FAILED, REFUSED) and not alike else ""
        peers.close(failed, refused=result.exit_code == REFUSED)
        return result


class Ending:
    """Exit code and reason of an attempt, as far as known, and the methods by which other threads end the attempt."""

    def __init__(self):
        self.step = 0  # optimizer steps done
        self.code, self.reason = FAILED, "ended by an exception"
        self.error: Exception | None = None  # an expected failure of training
        self.over = False  # the attempt has ended by itself
        self._once = threading.Lock()  # held while another thread ends the run
        self.watch: Watch | None = None  # planned and measured step times; None without a plan
        self.receipt: Receipt | None = None
        self.ledger: Ledger | None = None
        self.peers = Peers(0, 1)

    def failed(self, code: int, error: Exception) -> None:
        """Record an expected exception of training, and the exit code for it."""
        self.code, self.error, self.reason = code, error, first_line(error)

    def hung(self, cause: str) -> None:
        """Complete receipt and ledger of a run that the watchdog ends."""
        self._finish(HUNG, cause)

    def asked_early(self, name: str, code: int) -> None:
        """Complete receipt and ledger after a stop request before the first step, and pass the request to all processes."""
        self.peers.ask_to_stop(name)
        forbid_restart(name)
        with self._once:
            if not self.over:
                self._finish(code, f"{name} before the first step")
                self.code, self.over = code, True
        self.peers.close()

    def lost_process(self, words: str) -> None:
        """End this process, because another process of the run is lost or refused, and this process would wait for it."""
        code, then = AGAIN, "stopping, to be restarted from the newest checkpoint"
        if self.peers.refused:
            code, then = REFUSED, "this process does too"
        with self._once:
            if self.over:
                os._exit(self.code)
            try:
                os.write(2, f"\n{words}: {then}.\n".encode())
                self._finish(code, words)
            finally:
                os._exit(code)

    def _finish(self, code: int, reason: str) -> None:
        if self.ledger is not None:
            self.ledger.end(code, reason)
        if self.receipt is not None:
            try:
                self.receipt.finish(code, reason)
            except NotWritten as error:  # the process ends with `code` in any case
                os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))


def train_attempt(
    run: RunConfig,
    workdir: Path,
    launch: Launch,
    overlay: environment.Overlay,
    own_process: bool,
    watchdog: Watchdog,
    peers: Peers,
    ending: Ending,
) -> Result:
    """Check the run, lock its folder, open log and receipt, train, and close everything."""
    start_times = StartTimes()
    set_compile_cache(run.paths.cache)
    checkpoints = open_checkpoints(run.checkpoint, workdir, peers)
    with contextlib.ExitStack() as stack:
        try:
            check_shared(run.checkpoint.dir, workdir, checkpoints, peers)
            setup = check_setup(run, workdir, launch, checkpoints, own_process)  # writes nothing
            refuse_together("room", peers, lambda: check_room(setup))
            with metrics.naming(workdir):
                workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_workdir(setup, overlay, peers))
            refuse_together("references", peers, lambda: check_references(setup))
            services = stack.enter_context(open_services(setup, overlay, own_process, watchdog, ending))
        except ConfigError as error:
            return Result(REFUSED, str(error), 0, {}, checkpoints.directory, error)
        except NotWritten as error:  # nothing has started
            refused = ConfigError([Problem("cannot start", None, str(error).rstrip("."), "")])
            return Result(REFUSED, str(refused), 0, {}, checkpoints.directory, refused)
        ending.step = setup.start.step
        train(setup, services, start_times, ending, own_process)
    found = {} if ending.error else newest(workdir)
    return Result(ending.code, ending.reason, ending.step, found, checkpoints.directory, ending.error)


# ---- The run's folder


class SharedRefusal(ConfigError):
    """A refusal that all processes of a run raise together."""


@contextlib.contextmanager
def lock_workdir(setup: Setup, overlay: environment.Overlay, peers: Peers) -> Iterator[None]:
    """Lock the run's folder, and check that the facts in ALIKE are the same on all processes of the run.

    Two runs in one folder would overwrite each other's metrics and checkpoints. Raises SharedRefusal if another run has the
    lock, or if a fact differs.
    """
    handle = lock(setup.workdir) if jax.process_index() == 0 else NO_LOCK
    try:
        views = peers.gather("start", json.dumps(view(setup, overlay)), AGREE_S)
        seen = [json.loads(each) for each in views]
        for name, remedy in ALIKE.items():
            if len({json.dumps(each[name], sort_keys=True) for each in seen}) > 1:
                found = "; ".join(f"process {i}: {each[name]}" for i, each in enumerate(seen[:4]))
                raise SharedRefusal([Problem(name, None, f"the processes of this run do not see the same ({found})", remedy)])
        if peers.gather("lock", "locked" if handle is None else "", AGREE_S)[0]:
            rule, remedy = "another run is at work in this folder", "Wait for it, stop it, or name another folder."
            raise SharedRefusal([Problem("--workdir", str(setup.workdir), rule, remedy)])
        yield
    finally:
        if handle is not None and handle != NO_LOCK:
            os.close(handle)


def check_shared(folder: str, workdir: Path, checkpoints: Checkpoints, peers: Peers) -> None:
    """Raise SharedRefusal if the processes do not share the run's folder, and that of its checkpoints, in which all write.

    folder: checkpoint.dir.
    """
    folders = {"--workdir": workdir}
    if not checkpoints.storage.is_bucket:
        folders["checkpoint.dir"] = Path(checkpoints.storage.path)
    unshared = find_unshared(folders, peers, AGREE_S)
    if "--workdir" in unshared and not folder:  # it is one mistake
        unshared.pop("checkpoint.dir", None)
    remedies = {
        "--workdir": "Name a folder on a file system that all nodes share, by its full path.",
        "checkpoint.dir": "Set checkpoint.dir to the full path of a folder that all nodes share, or to a bucket.",
    }
    if unshared:
        raise SharedRefusal([Problem(key, str(folders[key]), rule, remedies[key]) for key, rule in unshared.items()])


def refuse_together(name: str, peers: Peers, check: Callable[[], list[Problem]]) -> None:
    """Run a check on process 0. If it finds problems, raise SharedRefusal on all processes."""
    problems = check() if jax.process_index() == 0 else []
    found = json.loads(peers.gather(name, json.dumps([dataclasses.astuple(p) for p in problems]), AGREE_S)[0])
    if found:
        raise SharedRefusal([Problem(*each) for each in found])


def check_references(setup: Setup) -> list[Problem]:
    """Return the problems of the reference log-probabilities of a run whose reference no longer exists (references.check)."""
    run, start = setup.run, setup.start
    new_adapters = setup.program.adapters and not start.adapters
    if new_adapters or not (run.loss.of_pairs and start.resumed):
        return []
    saved = setup.checkpoints.meta(start.step)
    return references.check(run, setup.workdir, start.step, saved, [setup.data, *setup.held_out.values()])


def check_room(setup: Setup) -> list[Problem]:
    """Return a problem if a disk has no room for one more checkpoint, or for the run's own files. Writes nothing."""
    run, storage = setup.run, setup.checkpoints.storage
    problems = []
    free, size = free_bytes(setup.workdir), setup.program.checkpoint_bytes
    if free is not None and free < OWN_BYTES:
        rule = f"{decimal(free)} are free there, and log, metrics and receipt need some {decimal(OWN_BYTES)}"
        problems.append(Problem("--workdir", str(setup.workdir), rule, "Free some space, or name another folder."))
    room = None if setup.start.step == run.train.steps else storage.room()
    if room is not None and room < size:
        rule = f"{decimal(room)} are free there, and a checkpoint has {decimal(size)}"
        fix = f"Free {decimal(size - room)} more, or set checkpoint.dir to a folder on another disk."
        if setup.start.resumed:  # a run goes on from the checkpoints in checkpoint.dir alone
            fix = f"Free {decimal(size - room)} more, or move the folder to another disk and set checkpoint.dir to it."
        problems.append(Problem("checkpoint.dir", str(storage.path), rule, fix))
    return problems[:1] if not run.checkpoint.dir else problems  # it is one disk


def room_note(setup: Setup) -> str:
    """Return a warning if later saves will not fit, although the next one does; "" if all fit.

    Old steps are deleted after a new one is complete, so checkpoint.keep + 1 of them are on the disk at a time.
    """
    c, steps, storage = setup.run.checkpoint, setup.run.train.steps, setup.checkpoints.storage
    size = setup.program.checkpoint_bytes
    if jax.process_index() or (room := storage.room()) is None:
        return ""
    start, every = setup.start.step, c.every_steps
    saves = steps // every - start // every + (steps % every > 0) if every else 1
    more = (steps // c.keep_every - start // c.keep_every if c.keep_every else 0) + c.keep_best
    there = [step for step in setup.checkpoints.steps() if not c.keep_every or step % c.keep_every]
    need = min(saves, c.keep + 1 + more - len(there))
    if room >= need * size:
        return ""
    fits = room // size
    return (
        f"{storage.path} has room for {fits} checkpoints of {decimal(size)}, and this run keeps up to {need} "
        "more: later saves will fail. Free some space, or lower checkpoint.keep"
    )


NO_LOCK = -1
OWN_BYTES = 1 << 20  # of a run's files without its checkpoints


def lock(folder: Path) -> int | None:
    """Return the file descriptor of a lock on a folder; None if another process has the lock.

    The lock is released when the descriptor is closed, or when this process ends.

    Some network file systems cannot lock a folder. Then the result is NO_LOCK.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        return NO_LOCK
    return handle


# Facts that must be the same on all processes before they start, with the remedy.
ALIKE = {
    "checkpoint.step": "Put the folder of checkpoints where all of them see the same files.",
    "data.source": "Give all of them the same token files.",
    "config": "Start all of them with the same command.",
    "code": "Bring the repository to the same state on all nodes.",
    "environment": "Give all of them the same variables, or set them by env.set.",
}


def view(setup: Setup, overlay: environment.Overlay) -> dict[str, Any]:
    """Return name in ALIKE -> the fact as this process has it."""
    return {
        "checkpoint.step": [setup.start.step, dataclasses.astuple(setup.start.position)],
        "data.source": setup.data.fingerprint,
        "config": config_sha256(to_dict(setup.asked)),
        "code": installed.code() if jax.process_count() > 1 else "",  # reads some 300 files
        "environment": overlay.common(),
    }


# ---- Log, metrics, receipt, ledger, signals


@contextlib.contextmanager
def open_services(
    setup: Setup, overlay: environment.Overlay, own_process: bool, watchdog: Watchdog, ending: Ending
) -> Iterator[Services]:
    """Open the files of an attempt and handle signals. After the block, record its exit in `ending`, and complete the files.

    Expected exceptions of training are recorded and reported, and not raised from the block. Raises ConfigError if a tracker or
    the receipt cannot be written.
    """
    workdir, process, peers = setup.workdir, jax.process_index(), ending.peers
    receipt = Receipt(workdir, process_index=process)
    try:
        given = to_dict(setup.asked)
        trackers = open_trackers(workdir, setup.run.log, given, resumed=setup.start.resumed, process_index=process)
    except TrackerError as error:
        raise ConfigError([Problem(error.key, setup.run.flat[error.key], error.reason, error.remedy)]) from error
    writers = metrics.Writers(workdir, trackers.all, process_index=process)
    try:
        preflight = keep_preflight(workdir) if process == 0 else None
        note = receipt.start(first_facts(setup, overlay) | trackers.facts | {"preflight": preflight})
    except NotWritten as error:
        writers.close(FAILED)
        raise ConfigError([Problem("cannot start", None, str(error).rstrip("."), "")]) from error
    ending.receipt = receipt
    born = time.time() - (process_age_s() if own_process else 0.0)
    ledger = ending.ledger = Ledger(workdir / goodput.FILE, born, active=process == 0)
    with contextlib.ExitStack() as closing:  # the log is closed last: trackers may have errors to tell
        try:
            console = closing.enter_context(Console(workdir, process, setup.run.train.steps, work=setup.run.ramp.before))
            with ledger, Stop(peers.ask_to_stop) as stop:

                def asked_early(name: str, code: int) -> None:
                    ending.asked_early(name, code)
                    if line := next_command(setup, ending, own_process):
                        console.say(line)

                for line in (*setup.launch.notes, *overlay.lines()):
                    console.say(line)
                if note:
                    console.warn(note)
                if own_process:
                    stop.at_once = asked_early
                    peers.listen(stop.asked_elsewhere)
                try:
                    yield Services(console, writers, receipt, ledger, watchdog, peers, stop)
                except Diverged as error:
                    ending.failed(DIVERGED, error)
                    console.warn(str(error))
                except BadInit as error:
                    ending.failed(REFUSED, error)
                    console.warn(str(error))
                except (
                    OutOfMemory,
                    KernelNotBuilt,
                    CheckpointError,
                    MetricsError,
                    NotWritten,
                    Corrupted,
                    TokenFileError,
                ) as error:
                    ending.failed(FAILED, error)
                    console.warn(str(error))
                if (spent := ledger.close(ending.code, ending.reason)) is not None:
                    console.say(goodput.words(spent))
                    if line := next_command(setup, ending, own_process):
                        console.say(line)
        except BaseException as error:
            ending.reason = str(own_parts.problem_of(error) or f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            spent = ledger.close(ending.code, ending.reason)
            facts = ({"goodput": spent.record()} if spent else {}) | (ending.watch.record() if ending.watch else {})
            for last in (
                lambda: receipt.finish(ending.code, ending.reason, facts),
                lambda: writers.note("receipt", receipt.fields),
                lambda: writers.close(ending.code),
            ):
                try:
                    last()
                except NotWritten as error:
                    if ending.error is None:  # otherwise this is the same disk
                        ending.failed(FAILED, error)
                        print(f"error: {error}", file=sys.stderr)


def next_command(setup: Setup, ending: Ending, own_process: bool) -> str:
    """Return a line with the command to type after this run: the same one if it was stopped, else that of its report.

    Return "" for a run without a step. The command of several processes is that of their launcher, which is not known here.
    """
    argv, stopped = setup.launch.argv, ending.error is None and ending.code in (AGAIN, INTERRUPTED)
    if stopped and own_process and ending.peers.count == 1:
        return f"resume: {variables()}{training(shlex.join(argv))}"
    return f"report: {spelled('python -m jaxtrain report')} {shlex.quote(str(setup.workdir))}" if ending.step else ""


def keep_preflight(workdir: Path) -> dict[str, Any] | None:
    """Copy the findings of preflight into the run's folder. Return its verdict and the checks that did not pass, or None."""
    path = os.environ.get(PREFLIGHT)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError) as error:
        return {"error": f"{PREFLIGHT}={path}: {error}"}
    if not found:
        return None
    metrics.write_atomic(workdir / "preflight.json", json.dumps(found, indent=1) + "\n")
    checks = [{"host": node["host"], **check} for node in found["nodes"] for check in node["checks"]]
    return {"verdict": found["verdict"], "checks": [check for check in checks if check["state"] != "ok"]}


def first_facts(setup: Setup, overlay: environment.Overlay) -> dict[str, Any]:
    """Return the facts of a receipt that are known before training.

    `ranks` has id, process, and number on its node (GPUs only) of each device of the flattened mesh. The ranks of an NCCL
    communicator over a mesh axis have this order.
    """
    ranks = list(setup.program.placement.mesh.devices.flat)
    return {
        "config": setup.launch.name,
        "resolved": to_dict(setup.asked),
        "overrides": dict(setup.launch.overrides),
        "devices": device_facts(jax.devices()),
        "mesh": dict(setup.program.placement.mesh.shape),
        "attention": setup.program.kernel.name,
        "max_segments": setup.run.data.max_segments,
        "data": setup.data.fingerprint,
        "eval_data": {name: batches.fingerprint for name, batches in setup.held_out.items()},
        "synthetic": setup.data.synthetic,
        "resumed_from_step": setup.start.step if setup.start.resumed else None,
        "restart": int(os.environ.get(RESTART, 0)),
        "ranks": {
            "device": [d.id for d in ranks],
            "process": [d.process_index for d in ranks],
            "gpu": [getattr(d, "local_hardware_id", None) for d in ranks],
        },
        "env": {"set": overlay.set, "inherited": overlay.inherited},
    }


# ---- Training


def train(setup: Setup, services: Services, start_times: StartTimes, ending: Ending, own_process: bool) -> None:
    """Train within `train.max_minutes`, and wait for running saves. Set the exit code and the reason in `ending`.

    Raises Diverged, OutOfMemory, KernelNotBuilt, CheckpointError, MetricsError, Corrupted, and the exceptions of data and
    devices.
    """
    peers, stop = services.peers, services.stop
    saver = Saver(to_dict(setup.asked), setup.program, setup.checkpoints, services)
    saver.remember(text=setup.text.record(), positions=setup.positions)

    def ask_to_stop(why: str) -> None:
        stop.asked_elsewhere(why)  # before the first step this ends the process
        peers.ask_to_stop(why)

    seconds, _ = limit_s(setup.run.train.max_minutes, age=process_age_s() if own_process else 0.0)
    with TimeLimit(seconds, lambda: saver.longest_s, ask_to_stop):
        try:
            ending.code, ending.reason = train_steps(setup, services, saver, start_times, ending)
        except NotWritten:
            with contextlib.suppress(NotWritten):  # the receipt is on the same disk
                saver.finish()
            services.console.say(saver.newest_in_words)
            raise
        except BaseException:
            saver.finish()  # the save before a failed step may be running, and its end must be in the log
            raise


def train_steps(setup: Setup, services: Services, saver: Saver, start_times: StartTimes, ending: Ending) -> tuple[int, str]:
    """Compile, restore, take the steps, and save after the last step. Return (exit code, reason)."""
    run, console, steps = setup.run, services.console, setup.run.train.steps
    print_summary(setup.program, setup.start, setup.data, setup.held_out, setup.checkpoints.directory, console)
    if not setup.asked.data.max_segments and run.data.masks_documents:
        console.say(f"data: up to {run.data.max_segments} documents in a sequence")
    for prompt in samples.prompts(run.sample.prompt) if setup.tokenizer else ():
        if note := text_format.control_in(prompt, setup.tokenizer, "sample.prompt"):
            console.warn(note)
    if others := getattr(setup.data, "templates", ()):
        named = " and ".join([setup.text.template_name, *others])
        console.warn(f"data: written with several chat templates, {named}. Samples and exports have the first")

    def first_state(asked: RunConfig, setup: Setup) -> Restored:
        restored = restore(asked, setup.program, setup.start, setup.checkpoints, services)
        saver.newest = restored.start.step if restored.start.resumed else -1
        ending.step = restored.start.step
        return restored

    restored = None
    if setup.start.step == steps:
        restored = first_state(setup.asked, setup)
        if restored.start.step == steps:
            return DONE, nothing_left(setup, restored, services)
        # The last checkpoint was damaged, and the one before is not the last step.
    metrics.write_atomic(setup.workdir / "config.json", json.dumps(to_dict(setup.asked), indent=1) + "\n")
    start_times.end("open")
    if note := room_note(setup):
        console.warn(note)
    if run.checkpoint.every_steps or run.checkpoint.keep_best:
        saver.snapshots.reserve()  # takes minutes for a large state, so it runs during compilation
    with out_of_memory_explained(run, {}), services.phase("compile", "compile"):
        setup, compiled = compile_steps(setup, services)
        watch = expected_times(setup, compiled, services)
        sizes = {compiled.size: compiled}
        for each in setup.run.ramp.sizes(setup.start.step, setup.run.train.steps)[1:]:
            sizes[each] = resized(setup, compiled, each, services)  # a step that does not fit ends the run here
    start_times.end("compile")

    with out_of_memory_explained(setup.run, compiled.memory):
        restored = restored or first_state(setup.asked, setup)
        continue_sources(setup.run.train, restored.start, setup.data, console.say)
        rewind_metrics(setup, restored, services)
        jax.block_until_ready(restored.state)
        start_times.end("restore" if restored.start.resumed else "initial state")
        check_free_memory(compiled.program, compiled.train, jax.local_devices())
        if run.loss.of_pairs and not learn_references(setup, restored, saver, services):
            return stopped(restored.start.step, saver, services)

        def restore_newest() -> Restored:
            """Restore the newest checkpoint that is not damaged, even if the command has an older checkpoint.step."""
            asked = without_step(setup.asked)
            start = choose_start(asked, setup.checkpoints, setup.program)
            return first_state(asked, dataclasses.replace(setup, start=start))

        pools = {d.local_hardware_id: d.memory_stats for d in jax.local_devices() if d.platform == "gpu"}
        with Monitor(pools, process=services.peers.process_index) as monitor:
            log = StepLog(setup.program, setup.data, services, monitor, watch)
            loop = Loop(setup, sizes, restored, services, saver, log, start_times, restore_newest)
            del restored  # its state is donated to the first step
            services.watchdog.facts = loop.facts
            try:
                loop.train()
            finally:
                ending.step, ending.watch = loop.done, log.watch
        services.ledger.base("other")
        saver.finish(save_again=loop.save)
        saver.check_finite(loop.applied)
        if services.stop_requested and loop.done < steps:
            return stopped(loop.done, saver, services)
        if not loop.applied:
            raise Diverged(explain(f"all {steps} steps were skipped", saver.newest, 0, weights=False, rollback=False))
        if saver.failures:
            raise CheckpointError(f"the last step could not be saved (see above). {saver.newest_in_words}")
        loop.samples.write(state.weights(loop.current), loop.done)
    return DONE, f"{loop.done} steps"


def learn_references(setup: Setup, restored: Restored, saver: Saver, services: Services) -> bool:
    """Add the reference model's log-probabilities to the data. Return False if the run was asked to stop before the end."""
    saved = setup.checkpoints.meta(restored.start.step) if restored.start.resumed else {}
    references = References(setup.program, restored, saved, services)
    saver.remember(**{META: references.digest})
    return references.learn(setup.workdir, [setup.data, *setup.held_out.values()])


def without_step(run: RunConfig) -> RunConfig:
    """Return the run without `checkpoint.step`, so that it resumes from its newest checkpoint."""
    return dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, step=-1))


def stopped(done: int, saver: Saver, services: Services) -> tuple[int, str]:
    """Report the end of a run that was asked to stop after `done` steps. Return (exit code, reason)."""
    why = services.peers.stop_reason or ""
    forbid_restart(why)
    if saver.newest == done and not saver.failures:
        saved = f"state saved at step {done}"
    elif saver.newest >= 0:
        saved = f"the newest checkpoint is step {saver.newest}"
    elif saver.failures:
        saved = f"step {done} could not be saved, and there is no checkpoint"
    else:
        saved = "no step was applied, nothing to save" if done else "before the first step, nothing to save"
    name = "Ctrl-C" if why == "SIGINT" else why
    services.console.say(f"{name}: {saved}; the same command goes on from there.")
    return services.stop.exit_code_of(why), f"{why} at step {done}"


def nothing_left(setup: Setup, restored: Restored, services: Services) -> str:
    """Report that all steps are done, and write the last samples if no earlier attempt has. Return the reason for the exit."""
    steps = setup.run.train.steps
    services.console.say(f"all {steps} steps are done: nothing to train. A larger train.steps continues from here.")
    rewind_metrics(setup, restored, services)
    writer = SampleWriter(setup, services)
    if not writer.written(steps):
        writer.write(state.weights(restored.state), steps)
    return f"{steps} steps were done already"


def rewind_metrics(setup: Setup, restored: Restored, services: Services) -> None:
    """Remove metrics and samples of steps after the restored one, which this attempt repeats.

    If the run starts from step 0, earlier metrics in its folder are renamed instead.
    """
    writers = services.writers
    for moved in () if restored.start.resumed else writers.set_aside():
        directory = setup.checkpoints.directory
        services.console.say(f"no checkpoint in {directory}: starting at 0; the earlier metrics are now {moved}")
    writers.rewind(restored.start.step)
    writers.note("config", to_dict(setup.asked))


def newest(workdir: Path) -> dict[str, Any]:
    """Return the last line of kind `train` in a run's metrics.jsonl; {} if there is none."""
    path, last = workdir / "metrics.jsonl", {}
    for line in metrics.read(path) if path.exists() else ():
        last = line if line["kind"] == "train" else last
    return last
