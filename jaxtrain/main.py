"""The command line of training: read the config, check everything, set the environment, and only then start JAX."""

import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import ml_collections

from jaxtrain.commands.command import add_process_options, process_options, read_line
from jaxtrain.config import environment, explain, hardware, launch, own_parts
from jaxtrain.config.command_line import FAILED, INTERRUPTED, REFUSED, Parser, path_text
from jaxtrain.config.schema import ConfigError, RunConfig, to_dict
from jaxtrain.runtime import distributed
from jaxtrain.runtime.startup import set_environment, start_processes
from jaxtrain.step.validate import validate
from jaxtrain.step.validate_layout import derived_values
from jaxtrain.step.validate_places import check_lock, check_remote, check_resume, check_settings_given

RETRY = 75  # exit code: start again


def parser() -> Parser:
    """Return the parser of the command line."""
    command = Parser(
        "main",
        "Train a language model, or resume its training: a workdir that holds checkpoints is resumed.",
        config=True,
        examples=("", "--config=configs/llama3_8b.py --config.train.steps=1000 --workdir=runs/first"),
        notes=f"Configs: {', '.join(sorted(p.stem for p in (launch.REPO / 'configs').glob('*.py')))}.\n\n"
        "Exit codes: 0 done; 2 the command or config is wrong, nothing was started or written; 75 start again (preempted, or "
        "another process of the run failed); 76 diverged; 124 the watchdog ended a hang; 130 Ctrl-C, state saved; 1 anything "
        "else. SIGUSR2 takes a trace of the next profile.steps steps.",
    )
    command.option("workdir", "the run's folder; default runs/NAME of the config", "DIR", type=path_text)
    command.option("replay", "repeat a failed step, and show where its first bad value comes from", "BUNDLE")
    add_process_options(command)
    command.option("explain", "print every key, its value and who set it, check the config, and stop")
    return command


def main(argv: Sequence[str], own_process: bool = False) -> int:
    """Run the command line and return its exit code. own_process: see train.attempt."""
    command = parser()
    if text := command.help_of(argv):
        print(text, end="")
        return 0
    args = read_line(command, argv)
    loaded, problems, bundle = args.loaded, args.problems, args.replay
    cluster, new_problems = distributed.detect(process_options(args), os.environ)
    problems += new_problems
    if bundle:
        loaded = load_bundle(Path(bundle), loaded)
        problems += loaded.problems
    workdir = Path(args.workdir or Path("runs") / loaded.launch.name).expanduser()
    problems += check_remote("--workdir", args.workdir)
    certain = bool(problems)  # they do not follow from the number of devices, which other processes may contradict
    devices = distributed.all_devices(hardware.probe(), cluster)
    size_note = loaded.launch.size_note(devices.count) if devices.kind == "gpu" else ""
    if size_note:
        notes = (*loaded.launch.notes, size_note)
        loaded = dataclasses.replace(loaded, launch=dataclasses.replace(loaded.launch, notes=notes))
    if loaded.file_read:
        problems += validate(loaded.run, devices, workdir)
    if loaded.file_read and not bundle:
        reported = {p.key for p in problems}
        new_problems = check_settings_given(loaded, workdir) or check_resume(loaded.run, workdir)
        problems += [p for p in new_problems if p.key not in reported]
        if not args.explain and (cluster is None or cluster.process_id == 0):
            problems += check_lock(workdir)
    if args.explain and not problems and not bundle:
        problems += check_start(loaded.run, workdir, devices)

    def refuse(refusals: Sequence[launch.Problem]) -> int:
        if size_note:
            print(size_note, file=sys.stderr)
        return launch.report_problems(refusals, loaded.launch)

    if problems and (args.explain or cluster is None or not own_process):
        return refuse(problems)
    if args.explain:
        explain.print_config(loaded, derived_values(loaded.run, devices, workdir))
        print(explain.unchecked_note(loaded, devices.kind == "gpu"), file=sys.stderr)
        return 0
    if certain:
        refuse(problems)  # now, because the others may not be there to be told
    # `validate` has reported the problems of the overlay.
    overlay = environment.Overlay() if problems else environment.overlay(loaded.run, devices, os.environ)[0]
    set_environment(overlay)
    # Imported here: everything above must be fast, and the environment must be set before jax is imported.
    alone = cluster is None or not own_process
    try:
        start_processes(devices, cluster, problems)
        if bundle:
            from jaxtrain.train import replay

            return replay.report(Path(bundle), loaded.run)
        from jaxtrain.train import run as train

        result = train.attempt(loaded.run, workdir, loaded.launch, overlay, own_process=own_process)
    except distributed.ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return RETRY if alone else distributed.leave(RETRY)  # JAX may still be connecting, in a thread
    except ConfigError as error:
        code = REFUSED if certain else refuse(error.problems)
        return code if alone else distributed.leave(code)
    except Exception as error:
        is_users_error = own_parts.report_error(error, sys.stderr)  # log.txt has the traceback
        if alone and not is_users_error:
            raise
        if not is_users_error:
            traceback.print_exc()
        return FAILED if alone else distributed.leave(FAILED)
    except KeyboardInterrupt:  # Ctrl-C in a Python program that calls `main`, before or after the run handles signals
        print("interrupted", file=sys.stderr)
        return INTERRUPTED if alone else distributed.leave(INTERRUPTED)
    code = (
        launch.report_problems(result.error.problems, loaded.launch)
        if isinstance(result.error, ConfigError)
        else result.exit_code
    )
    if not alone:
        distributed.leave(code)  # Python's own exit waits for the other processes, for minutes if one of them has failed
    return code


def check_start(run: RunConfig, workdir: Path, devices: hardware.Devices) -> list[launch.Problem]:
    """Return the problems for which the start of this run would refuse it, although `validate` finds none. For --explain.

    They depend on the names of the model's parameters, on the user's own modules, on XLA's options, or on the weights in
    init.from. A run without any of these needs no check. Otherwise another process builds the program, abstractly and on as
    many CPUs as there are devices. It writes nothing, and takes some seconds. This process imports no jax.
    """
    part_names = (run.model.family, run.loss.name, run.optimizer.name, run.data.source, run.data.eval_source)
    modules = [name for name in part_names if ":" in name]
    named_parameters = run.optimizer.groups or run.train.freeze or run.lora.rank or run.init.from_
    if not (modules or named_parameters or run.compiler.options):
        return []
    from jaxtrain.train import child

    path = os.pathsep.join(filter(None, sys.path))  # the child finds the modules that this process finds
    environ = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices.count)}
    request = {"config": to_dict(run), "workdir": str(workdir), "gpus": devices.kind == "gpu"}
    answer = child.run_case("jaxtrain.train.setup:check_start", request, environ=environ)
    if answer["verdict"] in (child.OK, child.REFUSED):
        return [launch.Problem(**problem) for problem in answer.get("problems", ())]
    fix = f"Correct {', '.join(modules)}." if modules else "Report it."
    return [launch.Problem("cannot start", None, f"its check ended: {answer['why']}", fix)]


def load_bundle(bundle: Path, loaded: launch.LoadedConfig) -> launch.LoadedConfig:
    """Return `loaded` with the config of a replay bundle in place of the config file. The command line's overrides apply."""
    try:
        tree = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"holds no bundle.json with a config ({error})"
        if isinstance(error, FileNotFoundError):
            rule = "holds no bundle.json: a run writes one for each step that it skips, into WORKDIR/replay/step-N"
        kept = [file.parent for near in (bundle, bundle / "replay", bundle.parent) for file in near.glob("*/bundle.json")]
        remedy = f"Fix: --replay={kept[0]}" if kept else "Name the folder that the run's log names."
        problem = launch.Problem("--replay", str(bundle), rule, remedy)
        return dataclasses.replace(loaded, problems=[problem], file_read=False)
    config = ml_collections.ConfigDict(tree)
    problems = [p for key, text in loaded.launch.overrides for p in launch.apply_override(config, key, text)]
    run, new_problems = launch.resolve_config(config)
    return dataclasses.replace(loaded, run=run, problems=[*problems, *new_problems], file_read=True)


def start(argv: Sequence[str]) -> int:
    """Run the command line as this process's only work, and return its exit code."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it asks for a trace; before the first step it must not end the process
    return main(argv, own_process=True)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
