"""A training run, from its config to its exit code. `train` has its chapters, and `take_steps` those of the training itself.

`run` is for Python programs and notebooks. The command line (main.py) reports mistakes before jax is imported, then calls
`attempt`. Checks of data, devices, checkpoints, shapes and shardings come first. If a check refuses the run, no file is
written. The step is compiled next, and device memory is allocated only if the compiled step fits.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_collections

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import environment, hardware, own_parts
from jaxtrain.config.commands import to_run_sh, training_command
from jaxtrain.config.launch import Launch, shell_prefix
from jaxtrain.config.schema import ConfigError, Problem, RunConfig, to_dict
from jaxtrain.data.loading import resolve_with_epochs
from jaxtrain.data.tokenfile import TokenFileError
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import goodput
from jaxtrain.metrics.files import MetricsError, NotWritten
from jaxtrain.metrics.gpu_monitor import Monitor
from jaxtrain.runtime.distributed import PeerLost, Peers, detect
from jaxtrain.runtime.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.runtime.timelimit import TimeLimit, forbid_restart, limit_s
from jaxtrain.runtime.watchdog import Watchdog, parse_budgets
from jaxtrain.runtime.words import first_line
from jaxtrain.step import state
from jaxtrain.step.compiler import KernelNotBuilt
from jaxtrain.step.memory import OutOfMemory, check_free_memory, explain_out_of_memory
from jaxtrain.step.validate import validate
from jaxtrain.step.validate_places import check_remote
from jaxtrain.train import folder
from jaxtrain.train.corruption import Corrupted
from jaxtrain.train.divergence import Diverged, explain_divergence
from jaxtrain.train.evaluate import SampleWriter
from jaxtrain.train.folder import SharedRefusal, refuse_together
from jaxtrain.train.initial_state import BadInit, Restored, continue_sources, restore_state
from jaxtrain.train.loop import Loop
from jaxtrain.train.references import META, References
from jaxtrain.train.saver import Saver
from jaxtrain.train.services import Guards, Record, Services
from jaxtrain.train.setup import Setup, check_setup, compile_steps, expected_times, open_checkpoints, resize_steps
from jaxtrain.train.step_log import StepLog
from jaxtrain.train.summary import print_summary
from jaxtrain.train.timing import process_age_s

if TYPE_CHECKING:
    from etils import epath

DONE, FAILED, REFUSED, AGAIN, DIVERGED, HUNG, INTERRUPTED = 0, 1, 2, 75, 76, 124, 130  # exit codes
COMPILED_S = 5400.0  # timeout of processes that wait for one that compiles what they found in their caches
# Exceptions that may end training, reported by their message alone.
EXPECTED = (
    Diverged,
    BadInit,
    OutOfMemory,
    KernelNotBuilt,
    CheckpointError,
    MetricsError,
    NotWritten,
    Corrupted,
    TokenFileError,
)


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
      notes: first lines of the log, such as those of `loading.load_config`.

    Raises ConfigError, with all problems of the config, before anything is started or written. Raises Diverged, OutOfMemory,
    CheckpointError, MetricsError, or any other exception that ended the run.
    """
    user_run, problems, fitted = resolve_with_epochs(to_dict(config) if isinstance(config, RunConfig) else config)
    path, devices = Path(workdir).expanduser(), hardware.probe()
    problems += [*check_remote("workdir", os.fspath(workdir)), *validate(user_run, devices, path), *check_alone()]
    if problems:
        raise ConfigError(list({str(p): p for p in problems}.values()))
    overlay, _ = environment.overlay(user_run, devices, os.environ)
    set_environment(overlay)
    start_jax(devices)
    result = attempt(user_run, path, Launch("python", "", (), (), (*notes, *fitted)), overlay)
    if result.error is not None:
        raise result.error
    return result


def check_alone() -> list[Problem]:
    """Return the problems of a launcher's variables that describe several processes, if this program has not connected them."""
    if Peers.is_connected():
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
    record, peers = Record(), Peers.from_jax()
    budgets = parse_budgets(run.train.timeouts)[0] if own_process else {}

    def end_process(reason: str) -> None:
        """End this process, because another process of the run is lost or refused, and this process would wait for it."""
        code, then = AGAIN, "stopping, to be restarted from the newest checkpoint"
        if peers.refused:
            code, then = REFUSED, "this process does too"
        os.write(2, f"\n{reason}: {then}.\n".encode())
        record.leave(code, reason)

    with Watchdog(budgets, workdir, ended=functools.partial(record.end, HUNG), process_index=jax.process_index()) as watchdog:
        watchdog.peers = peers
        if own_process:
            peers.watch(end_process)
        try:
            with watchdog.phase("startup"):
                guards = Guards(own_process, record, watchdog, peers)
                result = train(run, workdir, launch, overlay or environment.Overlay(), guards)
        except PeerLost as error:
            if own_process:
                end_process(str(error))
            raise
        except BaseException as error:
            peers.close(f"{type(error).__name__}: {first_line(error)}", refused=isinstance(error, ConfigError))
            raise
        record.settle(result.exit_code)
        # All processes raise these together, so none reports itself as failed.
        raised_by_all = isinstance(result.error, CheckpointError | Corrupted | SharedRefusal)
        raised_by_all |= isinstance(result.error, BadInit) and result.error.on_all_processes
        failed = result.reason if result.exit_code in (FAILED, REFUSED) and not raised_by_all else ""
        peers.close(failed, refused=result.exit_code == REFUSED)
        return result


def train(run: RunConfig, workdir: Path, launch: Launch, overlay: environment.Overlay, guards: Guards) -> Result:
    """Check the run, lock its folder, open its files, train, and complete the files."""
    own_process, record, peers = guards.own_process, guards.record, guards.peers
    set_compile_cache(run.paths.cache)
    checkpoints = open_checkpoints(run.checkpoint, workdir, peers)
    with contextlib.ExitStack() as exit_stack:
        try:
            # Every check. Nothing is written before all have passed.
            folder.check_shared(run.checkpoint.dir, workdir, checkpoints, peers)
            setup = check_setup(run, workdir, launch, checkpoints, own_process)
            refuse_together("room", peers, lambda: folder.check_room(setup))
            # The run's folder, and the files of this attempt.
            with metrics.naming(workdir):
                workdir.mkdir(parents=True, exist_ok=True)
            exit_stack.enter_context(folder.lock_workdir(setup, overlay, peers))
            refuse_together("references", peers, lambda: folder.check_references(setup))
            env = {"set": overlay.set, "inherited": overlay.inherited}
            services = folder.open_services(exit_stack, setup, env, guards)
        except (ConfigError, NotWritten) as error:
            refused = error
            if isinstance(error, NotWritten):
                refused = ConfigError([Problem("cannot start", None, str(error).rstrip("."), "")])
            return Result(REFUSED, str(refused), 0, {}, checkpoints.directory, refused)
        console, ledger = services.console, services.ledger
        for line in (*launch.notes, *overlay.lines()):
            console.say(line)

        def stop_early(name: str, code: int) -> None:
            """End this process at a request to stop before the first step: there is nothing to save."""
            peers.ask_to_stop(name)
            forbid_restart(name)
            record.end(code, f"{name} before the first step", settle=True)
            peers.close()
            if line := next_command(setup, peers, code, None, 0, own_process):
                console.say(line)

        if own_process:
            services.stop.at_once = stop_early
            peers.listen(services.stop.handle_remote_stop)
        # Training.
        code, reason, failure = FAILED, "ended by an exception", None
        try:
            code, reason = take_steps(setup, services, guards)
        except EXPECTED as error:
            code = DIVERGED if isinstance(error, Diverged) else REFUSED if isinstance(error, BadInit) else FAILED
            reason, failure = first_line(error), error
            console.warn(str(error))
        except BaseException as error:
            reason = str(own_parts.problem_of(error) or f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            # The end of the files. A signal no longer changes it.
            services.stop.close()
            done = setup.start.step if ledger.step is None else ledger.step
            if (spent := ledger.close(code, reason)) is not None:
                console.say(goodput.format_goodput(spent))
                record.facts["goodput"] = spent.record()
            if line := next_command(setup, peers, code, failure, done, own_process):
                console.say(line)
            if (unwritten := folder.close_files(record, services, code, reason)) and failure is None:
                code, reason, failure = FAILED, first_line(unwritten), unwritten
                print(f"error: {unwritten}", file=sys.stderr)
    return Result(code, reason, done, {} if failure else newest_metrics(workdir), checkpoints.directory, failure)


def take_steps(setup: Setup, services: Services, guards: Guards) -> tuple[int, str]:
    """Compile, restore, take the steps within `train.max_minutes`, and save. Return (exit code, reason).

    Raises the exceptions in EXPECTED, and those of data and devices.
    """
    user_run, run, console, steps = setup.user_run, setup.run, services.console, setup.run.train.steps
    print_summary(setup, console)
    limit, _ = limit_s(run.train.max_minutes, age=process_age_s() if guards.own_process else 0.0)
    with Saver(setup, services) as saver, TimeLimit(limit, lambda: saver.longest_s, services.ask_to_stop):
        restored = None
        if setup.start.step == steps:
            restored = restore_state(user_run, setup.program, setup.start, setup.checkpoints, services)
            saver.newest = restored.start.step
            if restored.start.step == steps:
                return DONE, report_nothing_left(setup, restored, services)
            # The last checkpoint was damaged, and the one before is not the last step.
        metrics.write_atomic(setup.workdir / "config.json", json.dumps(to_dict(user_run), indent=1) + "\n")
        if note := folder.room_note(setup):
            console.warn(note)

        # Compile, while nothing is allocated.
        if run.checkpoint.every_steps or run.checkpoint.keep_best:
            saver.snapshots.reserve()  # takes minutes for a large state, so it runs during compilation
        with explain_out_of_memory(run, {}), services.phase("compile", "compile"):
            setup, compiled = compile_steps(setup, services)
            watch = expected_times(setup, compiled, services)
            sizes = {compiled.size: compiled}
            for size in run.ramp.sizes(setup.start.step, steps)[1:]:
                sizes[size] = resize_steps(setup, compiled, size, services)  # a step that does not fit ends the run here
            services.peers.gather("compiled", "", COMPILED_S)  # the wait for a slower process has compile's budget

        with explain_out_of_memory(setup.run, compiled.memory):
            # The first state.
            restored = restored or restore_state(user_run, setup.program, setup.start, setup.checkpoints, services)
            saver.newest = restored.start.step if restored.start.resumed else -1
            continue_sources(run.train, restored.start, setup.data, console.say)
            rewind_metrics(setup, restored, services)
            jax.block_until_ready(restored.state)
            check_free_memory(compiled.program, compiled.train, jax.local_devices())
            if run.loss.is_pairwise and not learn_references(setup, restored, saver, services):
                return report_stop(restored.start.step, saver, services)

            # The steps.
            pools = {d.local_hardware_id: d.memory_stats for d in jax.local_devices() if d.platform == "gpu"}
            with Monitor(pools, process=services.peers.process_index) as monitor:
                log = StepLog(setup.program, setup.data, services, monitor, watch)
                loop = Loop(setup, sizes, restored, services, saver, log)
                del restored  # its state is donated to the first step
                services.watchdog.facts = loop.facts
                try:
                    loop.train()
                finally:
                    guards.record.facts |= log.watch.record() if log.watch else {}

            # The last save, and the last samples.
            services.ledger.base("other")
            saver.finish(save_again=loop.save)
            saver.check_finite(loop.num_applied)
            if services.stop_requested and loop.done < steps:
                return report_stop(loop.done, saver, services)
            if not loop.num_applied:
                raise Diverged(
                    explain_divergence(f"all {steps} steps were skipped", saver.newest, 0, weights=False, rollback=False)
                )
            if saver.failures:
                raise CheckpointError(f"the last step could not be saved (see above). {saver.newest_in_words}")
            loop.samples.write(state.eval_weights(loop.current), loop.done)
    return DONE, f"{loop.done} steps"


def learn_references(setup: Setup, restored: Restored, saver: Saver, services: Services) -> bool:
    """Add the reference model's log-probabilities to the data. Return False if the run was asked to stop before the end."""
    saved = setup.checkpoints.meta(restored.start.step) if restored.start.resumed else {}
    references = References(setup.program, restored, saved, services)
    saver.remember(**{META: references.digest})
    return references.learn(setup.workdir, [setup.data, *setup.held_out.values()])


def rewind_metrics(setup: Setup, restored: Restored, services: Services) -> None:
    """Remove metrics and samples of steps after the restored one, which this attempt repeats.

    If the run starts from step 0, earlier metrics in its folder are renamed instead.
    """
    writers = services.writers
    for backup in () if restored.start.resumed else writers.set_aside():
        directory = setup.checkpoints.directory
        services.console.say(f"no checkpoint in {directory}: starting at 0; the earlier metrics are now {backup}")
    writers.rewind(restored.start.step)
    writers.note("config", to_dict(setup.user_run))


# ---- The ends of a run


def report_stop(done: int, saver: Saver, services: Services) -> tuple[int, str]:
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


def report_nothing_left(setup: Setup, restored: Restored, services: Services) -> str:
    """Report that all steps are done, and write the last samples if no earlier attempt has. Return the reason for the exit."""
    steps = setup.run.train.steps
    services.console.say(f"all {steps} steps are done: nothing to train. A larger train.steps continues from here.")
    rewind_metrics(setup, restored, services)
    writer = SampleWriter(setup, services)
    if not writer.has_written(steps):
        writer.write(state.eval_weights(restored.state), steps)
    return f"{steps} steps were done already"


def next_command(setup: Setup, peers: Peers, code: int, failure: Exception | None, done: int, own_process: bool) -> str:
    """Return a line with the command to type after this run: the same one if it was stopped, else that of its report.

    Return "" for a run without a step. The command of several processes is that of their launcher, which is not known here.
    """
    argv, stopped = setup.launch.argv, failure is None and code in (AGAIN, INTERRUPTED)
    if stopped and own_process and peers.count == 1:
        return f"resume: {shell_prefix()}{training_command(shlex.join(argv))}"
    return f"report: {to_run_sh('python -m jaxtrain report')} {shlex.quote(str(setup.workdir))}" if done else ""


def newest_metrics(workdir: Path) -> dict[str, Any]:
    """Return the last line of kind `train` in a run's metrics.jsonl; {} if there is none."""
    path, last = workdir / "metrics.jsonl", {}
    for line in metrics.read_metrics(path) if path.exists() else ():
        last = line if line["kind"] == "train" else last
    return last
