"""From a folder or a file to what the reports say: a run's traces, one trace, or a dump of a program."""

import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from jaxtrain import hardware, metrics
from jaxtrain.plan.program.hlo import HloError
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Rates
from jaxtrain.profile import measure, program, trace
from jaxtrain.profile.result import KINDS, Profile, Program
from jaxtrain.profile.trace import TraceError
from jaxtrain.profiling import HLO_TEXT

DUMPS = (".hlo.txt", ".hlo", ".hlo.pb")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's folder says beside its traces; empty where a trace has no run around it."""

    folder: Path | None
    name: str
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpus: int = 1  # of a node
    precision: str = ""
    untraced_ms: float | None = None


def traces(target: Path) -> list[Path]:
    """The traces that a target holds, oldest first. Raises TraceError where there is none."""
    if not target.exists():
        raise TraceError(f"{target}: there is no such file or folder. Name a run's folder, or a trace (*.xplane.pb).")
    found = trace.find(target) if target.is_dir() else [target]
    if not found:
        raise TraceError(
            f"{target}: no trace below this folder (*.xplane.pb). Start the run with --config.profile.start=STEP, or send "
            "SIGUSR2 to a running one."
        )
    return found


def dump_in(target: Path) -> Path | None:
    """The program's dump where a target is one, or is a run that has one and no trace."""
    if target.is_file() and target.name.endswith(DUMPS):
        return target
    found = [*target.glob(f"profile/{HLO_TEXT}"), *target.glob(HLO_TEXT)] if target.is_dir() and not trace.find(target) else []
    return found[0] if found else None


def run_around(target: Path) -> Run:
    """The run that a target belongs to: the nearest folder upwards that has a config and a receipt."""
    start = target.resolve()
    for folder in (start, *start.parents):
        if (folder / "config.json").is_file() and (folder / "receipt.json").is_file():
            config = json.loads((folder / "config.json").read_text())
            receipt = json.loads((folder / "receipt.json").read_text())
            devices = receipt["devices"]
            lines = metrics.read(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else ()
            times = [line["step_time_s"] for line in lines if line["kind"] == "train" and line["step_time_s"] is not None]
            return Run(
                folder,
                folder.name,
                ", ".join(devices["kind"]),
                receipt["mesh"],
                devices["count"] // devices["process_count"],
                config["precision"],
                statistics.median(times) * 1e3 if times else None,
            )
    return Run(None, target.name)


def rates_of(run: Run, device_kind: str) -> tuple[Rates | None, str]:
    """(rates of the GPU that ran, or None; then why there are none)."""
    if device_kind == "cpu":
        return None, "no plan for a CPU"
    if not run.device_kind:
        return None, "no plan: which GPU this was stands in the receipt of its run, and there is none around this trace"
    gpu = hardware.lookup(device_kind)
    if gpu is None:
        return None, f"no plan: nothing is known of {device_kind}"
    try:
        return rates_for(gpu, run.precision), ""
    except ValueError as error:
        return None, f"no plan: {error}"


def profile(path: Path, run: Run) -> Profile:
    """A trace, read. Raises TraceError for one that cannot be."""
    found = trace.read(path)
    number = measure.main_program(found)
    kind = run.device_kind or found.platform
    rates, no_plan = rates_of(run, kind)
    read, notes = _program(found, number, run)
    known = read.origins if read else {}
    steps = measure.windows(found, number, read.module if read else None)
    sums = {device: measure.sums(found.devices[device], steps[device], number, known) for device in steps}

    spent, hidden = measure.by_kind(sums)
    lengths = [(w.end - w.start) / measure.NS_PER_MS for windows in steps.values() for w in windows]
    planned, done = None, None
    if read:
        try:
            done = program.summary(read)
            planned = program.plan(read, rates) if rates else None
        except HloError as error:
            no_plan = no_plan or f"no plan: {error}"
            notes.append(f"no summary of the program: {error}")
    return Profile(
        name=run.name,
        trace=str(path),
        device_kind=kind,
        steps=tuple(sorted({w.step for windows in steps.values() for w in windows})),
        step_ms=statistics.fmean(lengths),
        step_range_ms=(min(lengths), max(lengths)),
        by_kind={name: spent.get(name, 0.0) for name in KINDS},
        hidden=hidden,
        by_part={f"{part}, {phase}" if phase else part: kinds for (part, phase), kinds in measure.by_part(sums).items()},
        named=measure.named(sums),
        ops=measure.ops(sums, rates),
        devices=measure.devices(sums),
        timeline=measure.timeline(sums),
        untraced_ms=run.untraced_ms,
        planned=planned,
        no_plan=no_plan if planned is None else "",
        program=done,
        notes=(*notes, *_caveats(found.platform, len(sums))),
    )


def _program(found: trace.Trace, number: int, run: Run) -> tuple[program.Read | None, list[str]]:
    """The traced program: from the trace, which has its memory too, else from the text beside it."""
    text = found.path.with_name(HLO_TEXT)
    try:
        if number in found.programs:
            return program.read_proto(found.programs[number][1], run.mesh, run.gpus), []
        if text.is_file():
            return program.read_text(text.read_text(), run.mesh, run.gpus), []
    except HloError as error:
        return None, [f"the program cannot be read, so time is told by names of kernels only: {error}"]
    rule = f"neither the trace nor a file {HLO_TEXT} beside it holds the program"
    return None, [f"{rule}, so time is told by names of kernels only."]


def _caveats(platform: str, devices: int) -> list[str]:
    """What the numbers of such a trace are not."""
    if platform == "gpu":
        return [
            "XLA launches every kernel by itself while a profiler listens (no command buffers), so a traced step takes longer "
            "than one without, and gaps between short kernels are larger."
        ]
    out = ["On a CPU, waiting for a core counts into what waits: threads of XLA, of the data and of other programs share them."]
    shared = f"{devices} devices of one host share its cores: their collectives wait for each other's arithmetic."
    return [*out, shared] if devices > 1 else out


def dump(path: Path, run: Run) -> Program:
    """The summary of a program's dump. Raises HloError or TraceError for one that cannot be read."""
    return program.summary(program.dump(path, run.mesh, run.gpus))
