"""The folder of a run: its checks, its lock, and the files of an attempt in it."""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.filesize import decimal

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.storage import free_bytes
from jaxtrain.config import environment, installed
from jaxtrain.config.schema import ConfigError, Problem, config_sha256, to_dict
from jaxtrain.metrics import files, goodput
from jaxtrain.metrics.files import NotWritten, Writers
from jaxtrain.metrics.goodput import Ledger
from jaxtrain.metrics.progress import Console
from jaxtrain.metrics.receipt import Receipt, device_facts
from jaxtrain.metrics.trackers import TrackerError, open_trackers
from jaxtrain.runtime.distributed import Peers
from jaxtrain.runtime.shared import find_unshared
from jaxtrain.runtime.signals import Stop
from jaxtrain.runtime.variables import PREFLIGHT, RESTART
from jaxtrain.train import references
from jaxtrain.train.services import Guards, Record, Services
from jaxtrain.train.setup import Setup
from jaxtrain.train.timing import process_age_s

REFUSED = 2  # exit code
AGREE_S = 600.0  # timeout of processes that wait for each other at the start


class SharedRefusal(ConfigError):
    """A refusal that all processes of a run raise together."""


@contextlib.contextmanager
def lock_workdir(setup: Setup, overlay: environment.Overlay, peers: Peers) -> Iterator[None]:
    """Lock the run's folder, and check that the facts in MUST_AGREE are the same on all processes of the run.

    Two runs in one folder would overwrite each other's metrics and checkpoints. Raises SharedRefusal if another run has the
    lock, or if a fact differs.
    """
    handle = lock_folder(setup.workdir) if jax.process_index() == 0 else NO_LOCK
    try:
        views = peers.gather("start", json.dumps(local_facts(setup, overlay)), AGREE_S)
        facts = [json.loads(each) for each in views]
        for name, remedy in MUST_AGREE.items():
            if len({json.dumps(each[name], sort_keys=True) for each in facts}) > 1:
                values = "; ".join(f"process {i}: {each[name]}" for i, each in enumerate(facts[:4]))
                raise SharedRefusal([Problem(name, None, f"the processes of this run do not see the same ({values})", remedy)])
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
    problem_fields = json.loads(peers.gather(name, json.dumps([dataclasses.astuple(p) for p in problems]), AGREE_S)[0])
    if problem_fields:
        raise SharedRefusal([Problem(*each) for each in problem_fields])


def check_references(setup: Setup) -> list[Problem]:
    """Return the problems of the reference log-probabilities of a run whose reference no longer exists."""
    run, start = setup.run, setup.start
    new_adapters = setup.program.adapters and not start.adapters
    if new_adapters or not (run.loss.is_pairwise and start.resumed):
        return []
    saved = setup.checkpoints.meta(start.step)
    return references.check_log_probs(run, setup.workdir, start.step, saved, [setup.data, *setup.held_out.values()])


def check_room(setup: Setup) -> list[Problem]:
    """Return a problem if a disk has no room for one more checkpoint, or for the run's own files. Writes nothing."""
    run, storage = setup.run, setup.checkpoints.storage
    problems = []
    free, size = free_bytes(setup.workdir), setup.program.checkpoint_bytes
    if free is not None and free < RUN_FILES_BYTES:
        rule = f"{decimal(free)} are free there, and log, metrics and receipt need some {decimal(RUN_FILES_BYTES)}"
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
    checkpoint, steps, storage = setup.run.checkpoint, setup.run.train.steps, setup.checkpoints.storage
    size = setup.program.checkpoint_bytes
    if jax.process_index() or (room := storage.room()) is None:
        return ""
    start, every = setup.start.step, checkpoint.every_steps
    saves = steps // every - start // every + (steps % every > 0) if every else 1
    more = (
        steps // checkpoint.keep_every - start // checkpoint.keep_every if checkpoint.keep_every else 0
    ) + checkpoint.keep_best
    saved_steps = [step for step in setup.checkpoints.steps() if not checkpoint.keep_every or step % checkpoint.keep_every]
    need = min(saves, checkpoint.keep + 1 + more - len(saved_steps))
    if room >= need * size:
        return ""
    fits = room // size
    return (
        f"{storage.path} has room for {fits} checkpoints of {decimal(size)}, and this run keeps up to {need} "
        "more: later saves will fail. Free some space, or lower checkpoint.keep"
    )


NO_LOCK = -1
RUN_FILES_BYTES = 1 << 20  # of a run's files without its checkpoints


def lock_folder(folder: Path) -> int | None:
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
MUST_AGREE = {
    "checkpoint.step": "Put the folder of checkpoints where all of them see the same files.",
    "data.source": "Give all of them the same token files.",
    "config": "Start all of them with the same command.",
    "code": "Bring the repository to the same state on all nodes.",
    "environment": "Give all of them the same variables, or set them by env.set.",
}


def local_facts(setup: Setup, overlay: environment.Overlay) -> dict[str, Any]:
    """Return name in MUST_AGREE -> the fact as this process has it."""
    return {
        "checkpoint.step": [setup.start.step, dataclasses.astuple(setup.start.position)],
        "data.source": setup.data.fingerprint,
        "config": config_sha256(to_dict(setup.user_run)),
        "code": installed.code_sha256() if jax.process_count() > 1 else "",  # reads some 300 files
        "environment": overlay.common(),
    }


# ---- The files of an attempt


def open_services(exit_stack: contextlib.ExitStack, setup: Setup, env: dict[str, Any], guards: Guards) -> Services:
    """Open the files of an attempt, and handle signals, until `exit_stack` is closed. `close_files` completes them.

    env: the entry `env` of the receipt. Raises ConfigError if a tracker cannot be opened, and NotWritten for the other files.
    """
    workdir, process, peers = setup.workdir, jax.process_index(), guards.peers
    try:
        config = to_dict(setup.user_run)
        trackers = open_trackers(workdir, setup.run.log, config, resumed=setup.start.resumed, process_index=process)
    except TrackerError as error:
        raise ConfigError([Problem(error.key, setup.run.flat[error.key], error.reason, error.remedy)]) from error
    writers, receipt = Writers(workdir, trackers.all, process_index=process), Receipt(workdir, process_index=process)
    start_time = time.time() - (process_age_s() if guards.own_process else 0.0)
    try:
        preflight = keep_preflight(workdir) if process == 0 else None
        note = receipt.start(first_facts(setup) | trackers.facts | {"env": env, "preflight": preflight})
        guards.record.receipt = receipt
        # The log is closed last: all else may have something to tell.
        console = exit_stack.enter_context(Console(workdir, process, setup.run.train.steps, work=setup.run.ramp.before))
        ledger = exit_stack.enter_context(Ledger(workdir / goodput.FILE, start_time, active=process == 0))
    except NotWritten as error:
        with contextlib.suppress(NotWritten):  # it is the same disk
            guards.record.finish(REFUSED, str(error))
        writers.close(REFUSED)
        raise
    guards.record.ledger = ledger
    stop = exit_stack.enter_context(Stop(peers.ask_to_stop))
    if note:
        console.warn(note)
    return Services(console, writers, receipt, ledger, guards.watchdog, peers, stop)


def close_files(record: Record, services: Services, code: int, reason: str) -> NotWritten | None:
    """Complete receipt, metrics and trackers, each even if another one cannot be written. Return the first error."""
    errors = []
    for close in (
        lambda: record.finish(code, reason),
        lambda: services.writers.note("receipt", services.receipt.fields),
        lambda: services.writers.close(code),
    ):
        try:
            close()
        except NotWritten as error:
            errors.append(error)
    return errors[0] if errors else None


def keep_preflight(workdir: Path) -> dict[str, Any] | None:
    """Copy the findings of preflight into the run's folder. Return its verdict and the checks that did not pass, or None."""
    path = os.environ.get(PREFLIGHT)
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError) as error:
        return {"error": f"{PREFLIGHT}={path}: {error}"}
    if not report:
        return None
    files.write_atomic(workdir / "preflight.json", json.dumps(report, indent=1) + "\n")
    checks = [{"host": node["host"], **check} for node in report["nodes"] for check in node["checks"]]
    return {"verdict": report["verdict"], "checks": [check for check in checks if check["state"] != "ok"]}


def first_facts(setup: Setup) -> dict[str, Any]:
    """Return the facts of a receipt that are known before training.

    `ranks` has id, process, and number on its node (GPUs only) of each device of the flattened mesh. The ranks of an NCCL
    communicator over a mesh axis have this order.
    """
    ranks = list(setup.program.placement.mesh.devices.flat)
    return {
        "config": setup.launch.name,
        "resolved": to_dict(setup.user_run),
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
    }
