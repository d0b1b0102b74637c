"""A training run, from a config to how it ended. This file composes the others and decides nothing they could.

`run` is what Python programs and notebooks call; the command line (main.py) answers before jax is imported, and calls
`attempt`.

The order is: what there is (data, devices, checkpoints), then what will be (shapes, shardings, the compiled step), and only
then memory is allocated. Nothing is written before the checks that may refuse the run have passed. The chapters of training
itself are in session.py.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_collections

from jaxtrain import compiler, config, environment, generate, goodput, hardware, installed, metrics, samples, step
from jaxtrain.between import HeldOut, Samples
from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.config import ConfigError, RunConfig, to_dict
from jaxtrain.corruption import Corrupted
from jaxtrain.data.pipeline import with_documents
from jaxtrain.data.tokenfile import TokenFileError
from jaxtrain.data.tokenizer import TokenizerError, load_tokenizer
from jaxtrain.distributed import Peers
from jaxtrain.divergence import Diverged
from jaxtrain.kernels.attention import Unsupported
from jaxtrain.launch import Launch, resolved
from jaxtrain.ledger import Ledger
from jaxtrain.memory import OutOfMemory
from jaxtrain.metrics import MetricsError
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.progress import Console
from jaxtrain.receipt import Receipt, ReceiptError, config_sha256, device_facts
from jaxtrain.session import FAILED, Session
from jaxtrain.sharding import LayoutError
from jaxtrain.signals import Stop
from jaxtrain.start import Start, check_own_names, decide_start, going_on, open_data
from jaxtrain.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.timelimit import TimeLimit, limit_s, tell_launcher
from jaxtrain.timeline import Timeline, age_s
from jaxtrain.trackers import TrackerError, open_trackers
from jaxtrain.validate import validate
from jaxtrain.validate.places import remote
from jaxtrain.watchdog import Watchdog, parse_budgets

if TYPE_CHECKING:
    from jaxtrain.checkpoint.place import AnyPath

REFUSED, AGAIN, DIVERGED, HUNG = 2, 75, 76, 124
BEAT_S, DEAD_S = 2.0, 15.0  # how often processes show that they live, and after how long one is taken for dead
AGREE_S = 600.0  # processes wait for each other so long at the start


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run, or an attempt at it, ended."""

    exit_code: int  # as that of the command: 0 done; 75 or 130 asked to leave by a signal, and saved
    reason: str  # in words, as in receipt.json
    step: int  # optimizer steps done
    metrics: dict[str, Any]  # the newest train line of metrics.jsonl; empty where there is none
    checkpoints: "AnyPath"  # the folder of the checkpoints, or its place in a bucket
    error: Exception | None = None  # what ended it; `run` raises that


def run(config: ml_collections.ConfigDict | RunConfig | Mapping[str, Any], workdir: str | os.PathLike[str]) -> Result:
    """Train in this process, as the command line does: checks everything, then goes on from what `workdir` holds, or begins.

    config: what a config file's `get_config` returns (start from `config.default_config()`). JAX may have been imported before;
    on GPUs nothing may have been computed, since JAX takes their memory, as `train.memory_fraction` says, when it starts.

    Signals (Ctrl-C, an interrupted notebook) end the run in good order where this is the main thread, and are left alone where
    it is not. XLA's compile cache stays at `paths.cache`.

    Raises ConfigError, with all that is wrong with the config, before anything is started or written; Diverged, OutOfMemory,
    CheckpointError or MetricsError where the run came to that, and whatever else ended it.
    """
    asked, problems = resolved(to_dict(config) if isinstance(config, RunConfig) else config)
    folder, devices = Path(workdir).expanduser(), hardware.probe()
    problems += [*remote("workdir", os.fspath(workdir)), *validate(asked, devices, folder)]
    if problems:
        raise ConfigError(list({str(p): p for p in problems}.values()))
    overlay, _ = environment.overlay(asked, devices, os.environ)
    set_environment(overlay)
    start_jax(devices)
    result = attempt(asked, folder, Launch("python", "", (), ()), overlay)
    if result.error is not None:
        raise result.error
    return result


def attempt(
    run: RunConfig, workdir: Path, launch: Launch, overlay: environment.Overlay | None = None, *, own_process: bool = False
) -> Result:
    """One attempt at a run that has passed validate.validate, on JAX as it was started. What ended it is in the result.

    overlay: the environment that was set for it, for log and receipt.
    own_process: the process is there for this run alone, and may be ended where it stands: by a signal before the first step,
    by the watchdog, and when another process of the run has died.
    """
    budgets = parse_budgets(run.train.timeouts)[0] if own_process else {}
    with contextlib.ExitStack() as stack:
        ending = Ending()
        watchdog = Watchdog(budgets, workdir, facts=ending.facts, ended=ending.hung, process_index=jax.process_index())
        stack.enter_context(watchdog)
        stack.enter_context(watchdog.phase("startup"))
        peers = ending.peers = Peers.of_this_run()
        if own_process:
            peers.watch(BEAT_S, DEAD_S, ending.alone)
        try:
            result = _attempt(run, workdir, launch, overlay or environment.Overlay(), own_process, watchdog, peers, ending)
        except BaseException as error:
            peers.close(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
        ending.result = result.exit_code  # a peer that is gone from here on changes nothing
        # What all processes decide alike is no failure of this one.
        alike = isinstance(result.error, CheckpointError | Corrupted)
        peers.close(result.reason if result.exit_code in (FAILED, REFUSED) and not alike else "")
        return result


class Ending:
    """How a run's files are brought to an end from outside its main thread, once there are any."""

    def __init__(self):
        self.receipt: Receipt | None = None
        self.session: Session | None = None
        self.ledger: Ledger | None = None
        self.peers = Peers(0, 1)
        self.result: int | None = None  # the exit code, once the run has come to its end

    def facts(self) -> dict[str, Any]:
        """For the watchdog's report."""
        return self.session.facts() if self.session else {}

    def hung(self, cause: str) -> None:
        """The watchdog ends the process."""
        self._finish(HUNG, cause)

    def early(self, name: str, code: int) -> None:
        """This run, or another of its processes, is asked to stop before the first step."""
        self.peers.ask_to_stop(name)
        tell_launcher(name)
        self._finish(code, f"{name} before the first step")
        self.peers.close()

    def alone(self, words: str) -> None:
        """Another process of the run has died: nothing that this one waits for will come. Ends the process."""
        if self.result is not None:
            os._exit(self.result)
        try:
            os.write(2, f"\n{words}: leaving, to be started again from the newest checkpoint.\n".encode())
            self._finish(AGAIN, words)
        finally:
            os._exit(AGAIN)

    def _finish(self, code: int, reason: str) -> None:
        if self.ledger is not None:
            self.ledger.end(code, reason)
        if self.receipt is not None:
            self.receipt.finish(code, reason)


def _attempt(
    run: RunConfig,
    workdir: Path,
    launch: Launch,
    overlay: environment.Overlay,
    own_process: bool,
    watchdog: Watchdog,
    peers: Peers,
    ending: Ending,
) -> Result:
    # ---- Set up JAX
    timeline = Timeline()
    set_compile_cache(run)
    devices = jax.devices()

    # ---- What there is: data and checkpoints. Nothing is written yet.
    place = run.checkpoint.dir or workdir / "checkpoints"
    checkpoints = Checkpoints(place, run.checkpoint.keep, run.checkpoint.keep_every, peers)

    def refused(problems: list[config.Problem]) -> Result:
        error = ConfigError(problems)
        return Result(REFUSED, str(error), 0, {}, checkpoints.directory, error)

    try:
        check_own_names(run)
        run = going_on(run, checkpoints)
        train_data, held_out = open_data(run)
        asked, run = run, with_documents(run, train_data, *held_out.values())
        program = step.build(run, devices)
        chosen = compiler.choose(program, compiler.card_of(jax.local_devices()[0], run.train.memory_fraction))
        step_s = parse_budgets(run.train.timeouts)[0]["step"] if own_process else 0.0
        start = decide_start(asked, checkpoints, program)
        traced = run.profile.start > 0 and start.step < run.profile.start + run.profile.steps
        on_gpus = devices[0].platform == "gpu"
        chosen = compiler.for_run(chosen, on_gpus, step_s, run.train.deterministic, workdir, traced)
        # Now, although they are used later: a tokenizer that is missing, or of another model, should not end a run half-way.
        tokenizer = load_tokenizer(run.data.tokenizer) if run.sample.max_tokens and not train_data.synthetic else None
        for prompt in samples.prompts(run.sample.prompt) if tokenizer else ():
            generate.prompt_ids(tokenizer, prompt, run.model.vocab_size)
    except ConfigError as error:
        return refused(error.problems)
    except (CheckpointError, HuggingFaceError, LayoutError, Unsupported, TokenizerError) as error:
        return refused([config.Problem("cannot start", None, str(error).rstrip("."), "")])

    # ---- The run's folder, its log and its receipt
    workdir.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(workdir)
    seen = [json.loads(each) for each in peers.gather("start", json.dumps(view(asked, start, train_data, overlay)), AGREE_S)]
    for name, remedy in ALIKE.items():
        if len({json.dumps(each[name], sort_keys=True) for each in seen}) > 1:
            found = "; ".join(f"process {i}: {each[name]}" for i, each in enumerate(seen[:4]))
            problem = config.Problem(name, None, f"the processes of this run do not see the same ({found})", remedy)
            unlock(-1 if lock is None else lock)
            return refused([problem])
    taken = peers.gather("lock", "locked" if lock is None else "", AGREE_S)[0]
    if lock is None or taken:
        rule = "another run is at work in this folder"
        return refused([config.Problem("--workdir", str(workdir), rule, "Wait for it, stop it, or name another folder.")])
    receipt = ending.receipt = Receipt(workdir, process_index=jax.process_index())
    try:
        trackers = open_trackers(workdir, run.log, resumed=start.resumed, process_index=jax.process_index())
    except TrackerError as error:
        unlock(lock)
        return refused([config.Problem("log.wandb", run.log.wandb, str(error).rstrip("."), "")])
    writers = metrics.Writers(workdir, trackers.all, process_index=jax.process_index())
    try:
        receipt.start(
            {
                "config": launch.name,
                "config_sha256": config_sha256(config.to_dict(asked)),
                "resolved": config.to_dict(asked),
                "overrides": dict(launch.overrides),
                "devices": device_facts(devices),
                "mesh": dict(program.placement.mesh.shape),
                "attention": program.attention,
                "max_segments": run.data.max_segments,
                "data": train_data.fingerprint,
                "eval_data": {name: batches.fingerprint for name, batches in held_out.items()},
                "synthetic": train_data.synthetic,
                "resumed_from_step": start.step if start.resumed else None,
                "restart": int(os.environ.get("JAXTRAIN_RESTART", 0)),
                "env": {"set": overlay.set, "inherited": overlay.inherited},
                **trackers.facts,
            },
            launch.config_file,
        )
    except ReceiptError as error:  # of an earlier attempt, and not to be overwritten
        writers.close(FAILED)
        unlock(lock)
        return refused([config.Problem("cannot start", None, str(error).rstrip("."), "")])
    metrics.write_atomic(workdir / "config.json", json.dumps(config.to_dict(asked), indent=1) + "\n")
    if fit := receipt.preflight:
        metrics.write_atomic(workdir / "preflight.json", json.dumps(fit, indent=1) + "\n")
    code, reason, ended = FAILED, "ended by an exception", None
    born = time.time() - (age_s() if own_process else 0.0)
    ledger = ending.ledger = Ledger(workdir / goodput.FILE, born, active=jax.process_index() == 0)
    try:
        with (
            Console(workdir, jax.process_index(), run.train.steps) as console,
            ledger,
            Stop(peers.ask_to_stop) as stop,
        ):
            for line in overlay.lines():
                console.say(line)
            if own_process:
                stop.at_once = ending.early
                peers.on_stop = stop.asked_elsewhere
            session = ending.session = Session(
                run,
                asked,
                workdir,
                console,
                stop,
                receipt,
                writers,
                checkpoints,
                program,
                chosen,
                start,
                train_data,
                HeldOut(run, program, held_out, writers, console, receipt),
                Samples(run, program, tokenizer, writers, console),
                peers,
                watchdog,
                launch.argv,
                timeline,
                ledger,
            )

            def over(why: str) -> None:
                stop.asked_elsewhere(why)  # before the first step this leaves at once
                peers.ask_to_stop(why)

            try:
                seconds, _ = limit_s(run.train.max_minutes, age=age_s() if own_process else 0.0)
                with TimeLimit(seconds, lambda: session.longest_save_s, over):
                    code, reason = session.train()
            except Diverged as error:
                code, reason, ended = DIVERGED, str(error), error
                console.warn(reason)
            except (OutOfMemory, CheckpointError, MetricsError, Corrupted, TokenFileError) as error:
                code, reason, ended = FAILED, str(error).splitlines()[0], error
                console.warn(str(error))
            finally:
                # Where a step failed, the save before it may be under way still: how that ended belongs in the log too.
                session.finish_saves()
            if (spent := ledger.close(code, reason)) is not None:
                console.say(goodput.words(spent))
    except BaseException as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise
    finally:
        spent = ledger.close(code, reason)
        watch = ending.session.watch if ending.session else None
        receipt.finish(code, reason, ({"goodput": spent.record()} if spent else {}) | (watch.record() if watch else {}))
        writers.note("receipt", receipt.fields)
        writers.close(code)
        unlock(lock)
    return Result(code, reason, session.done, {} if ended else newest(workdir), checkpoints.directory, ended)


# What the processes of a run must agree about before they start, and what to do where they do not.
ALIKE = {
    "checkpoint.step": "Put the folder of checkpoints where all of them see the same files.",
    "data.source": "Give all of them the same token files.",
    "config": "Start all of them with the same command.",
    "code": "Bring the repository to the same state on all nodes.",
    "environment": "Give all of them the same variables, or set them by env.set.",
}


def view(run: RunConfig, start: Start, data: Any, overlay: environment.Overlay) -> dict[str, Any]:
    """What one process sees of it."""
    return {
        "checkpoint.step": [start.step, dataclasses.astuple(start.position)],
        "data.source": data.fingerprint,
        "config": config_sha256(config.to_dict(run)),
        "code": installed.code() if jax.process_count() > 1 else "",  # reads some 300 files
        "environment": overlay.common(),
    }


def newest(workdir: Path) -> dict[str, Any]:
    """The last train line of a run's metrics.jsonl; empty where there is none."""
    path, last = workdir / "metrics.jsonl", {}
    for line in metrics.read(path) if path.exists() else ():
        last = line if line["kind"] == "train" else last
    return last


def lock_folder(workdir: Path) -> int | None:
    """A lock on the run's folder, held until `unlock` or the end of this process, however it ends; None where another has it.

    Two runs in one folder would write over each other's metrics and checkpoints.
    """
    if jax.process_index() != 0:
        return -1
    handle = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # some network file systems cannot lock a folder; the run is no less right without
        os.close(handle)
        return -1
    return handle


def unlock(lock: int) -> None:
    """Lets the next run of this process into the folder."""
    if lock >= 0:
        os.close(lock)
