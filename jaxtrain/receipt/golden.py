"""A run against a golden one: the same losses, no slower, no more memory, and a checkpoint that is whole."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.metrics import write_atomic
from jaxtrain.receipt.comparable import in_no_order, other_evaluation, other_machine, other_work, rounding
from jaxtrain.receipt.compare import between, history
from jaxtrain.receipt.lineage import lineage
from jaxtrain.receipt.opened import VERDICT, Run
from jaxtrain.receipt.outcome import first_difference
from jaxtrain.receipt.result import Difference
from jaxtrain.receipt.settings import counts
from jaxtrain.receipt.stored import FORMAT, ReceiptError, now

OK, WORSE, NOT = "ok", "WORSE", "not compared"
LOSS_NAME, END = "loss", "end"  # the two without which nothing is proved
SLOWER, MORE = 5.0, 2.0  # percent; chosen, as all limits here, and options of the command
# Percent that a loss may differ by where bits cannot be the same: another machine adds in another order, and steps amplify it.
LOSS = 1.0

# What a golden run keeps of a receipt.
KEPT = (
    *("config", "config_sha256", "jaxtrain", "python", "packages", "versions", "environment", "env", "devices", "mesh"),
    *("attention", "remat", "compiler_options", "data", "eval_data", "memory_gib", "held_out"),
    *("exit_code", "reason", "started", "ended"),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One thing that was checked: `golden` and `run` as they were found, by which `rule`."""

    name: str
    state: str  # OK | WORSE | NOT
    golden: str
    run: str
    rule: str


def kept(run: Run) -> dict[str, Any]:
    """The golden receipt of a run. Raises ReceiptError for one that has no loss, is not done, or was made in several ways."""
    figures = run.figures
    if not figures["loss_at"]:
        raise ReceiptError(f"{run.path}: no loss was written in this run, so it is no golden one. Train some steps first.")
    if run.receipt.get("exit_code") != 0:
        raise ReceiptError(f"{run.path}: it has not ended with 0 ({run.end}), so it is no golden one. Name a run that is done.")
    past = [Difference(*key, value, "", earlier=True) for key, value in history(run).items()]
    if mixed := other_work(past) + rounding(past):
        rule = f"its attempts ran with other {_few(mixed)}, so no one config and machine stands for its losses"
        raise ReceiptError(f"{run.path}: {rule}. Name a run that was made in one way.")
    receipt, origin = run.receipt, lineage(run.attempts)[1]
    hardware, source = dict(receipt.get("hardware") or {}), receipt.get("source") or {}
    for name in ("before", "after"):
        hardware.pop(name, None)
    hardware["gpus"] = [{k: v for k, v in gpu.items() if k not in ("uuid", "pci")} for gpu in hardware.get("gpus", ())]
    return {
        "format": FORMAT,
        "golden": run.name,
        **{name: receipt[name] for name in KEPT if name in receipt},
        "resolved": _mattering(run.resolved) if run.resolved else None,
        "source": {name: source.get(name) for name in ("commit", "dirty", "files", "config_file", "own")},
        "hardware": hardware if "cpu" in hardware else None,
        "host": {name: value for name, value in receipt.get("host", {}).items() if name != "name"},
        "speed": figures["speed"],
        "memory": figures["memory"],
        "loss_at": figures["loss_at"],
        "loaded": origin and origin | {"from": None},
        "attempts": [],
    }


def _mattering(resolved: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config without what explains nothing: most of that are places of somebody's machine."""
    inner = {k: _mattering(v, f"{prefix}{k}.") if isinstance(v, dict) else v for k, v in resolved.items()}
    return {key: value for key, value in inner.items() if isinstance(value, dict) or counts(f"{prefix}{key}")}


def check(
    run: Run, golden: Run, *, slower: float = SLOWER, more_memory: float = MORE, loss_tolerance: float | None = None
) -> list[Verdict]:
    """The verdicts. Limits are in percent; loss_tolerance None: bit for bit where that can be, else LOSS.

    Raises ReceiptError where a file beside the receipt cannot be read.
    """
    found, notes = between(golden, run)
    blocked = [note for note in notes if note.startswith("config:")] + other_work(found)
    ways = [*rounding(found), *in_no_order(run, golden)]
    evaluated = [*blocked, *other_evaluation(found)]
    one, other = held_out(golden), held_out(run)
    return [
        _loss(LOSS_NAME, golden.losses, run.losses, blocked, ways, loss_tolerance),
        *(_loss(name, one[name], other.get(name, {}), evaluated, ways, loss_tolerance) for name in one),
        _at_most("step time", "s", _step_s, run, golden, slower, [*blocked, *other_machine(found)]),
        _memory(run, golden, more_memory, [*blocked, *other_machine(found)]),
        _end(run, golden),
        checkpoint(run),
    ]


def _end(run: Run, golden: Run) -> Verdict:
    done = all(one.receipt.get("exit_code") == 0 for one in (run, golden))
    return Verdict(END, OK if done else NOT, golden.end, run.end, "both ended with 0" if done else "not both ended with 0")


def held_out(run: Run) -> dict[str, dict[int, float]]:
    """The newest held-out losses by their steps, under the name of their check."""
    lines = run.receipt.get("held_out") or ()
    losses = [float("nan") if x["loss"] is None else x["loss"] for x in lines]  # JSON has no NaN and no infinity
    return {f"held-out loss {x.get('set', '')}".rstrip(): {x["step"]: loss} for x, loss in zip(lines, losses, strict=True)}


def _loss(
    name: str, golden: Mapping[int, Any], run: Mapping[int, Any], blocked: list[str], ways: list[str], tolerance: float | None
) -> Verdict:
    steps, first = first_difference(golden, run)
    if blocked or not steps:
        why = f"another computation: {_few(blocked)}" if blocked else "no step whose loss both have"
        return Verdict(name, NOT, "", "", why)
    last = f"{len(steps)} steps to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    late = [step for step in golden if step > steps[-1]]
    last += f"; the golden run goes on to {max(late)}" if late else ""
    if tolerance is None and not ways:
        rule = f"bit for bit, {last}"
        if first is None:
            return Verdict(name, OK, "", "", rule)
        return Verdict(name, WORSE, repr(golden[first]), repr(run[first]), f"{rule}; differs from {first} on")
    limit = LOSS if tolerance is None else tolerance
    rule = f"within {limit:g}%, {last}" + (f" (other {_few(ways)})" if tolerance is None else "")
    worst = max(steps, key=lambda step: _apart(golden[step], run[step]))
    apart = _apart(golden[worst], run[worst])
    state = OK if apart <= limit / 100 else WORSE
    values = (f"{golden[worst]:.6g}", f"{run[worst]:.6g}")
    return Verdict(name, state, *values, f"{rule}; most apart at {worst}: {apart:.3%}")


def _apart(golden: float, run: float) -> float:
    """Relative difference; that to or from what is no number is infinite."""
    if repr(golden) == repr(run):
        return 0.0
    apart = abs(run - golden) / abs(golden) if golden else float("inf")
    return apart if apart == apart else float("inf")


def _step_s(run: Run) -> float | None:
    return ((run.figures["speed"] or {}).get("step_time_s") or {}).get("median")


def _memory(run: Run, golden: Run, more: float, blocked: list[str]) -> Verdict:
    """Of the measured peak where both have one, else of the compiler's."""
    for name, what in (("peak_gib", "peak memory, measured"), ("compiler_peak_gib", "peak memory, compiler's")):

        def of(one: Run, name: str = name) -> float | None:
            return (one.figures["memory"] or {}).get(name)

        if of(run) is not None and of(golden) is not None:
            return _at_most(what, "GiB", of, run, golden, more, blocked)
    return Verdict("peak memory", NOT, "", "", "not measured: these devices do not tell, or one of the runs did not")


def _at_most(name: str, unit: str, of: Any, run: Run, golden: Run, percent: float, blocked: list[str]) -> Verdict:
    had, has = of(golden), of(run)
    golden_s, run_s = (f"{value:.4g} {unit}" if value is not None else "not measured" for value in (had, has))
    if blocked or had is None or has is None:
        why = f"other {_few(blocked)}" if blocked else "one of the runs is too short for it"
        return Verdict(name, NOT, golden_s, run_s, why)
    state = OK if has <= had * (1 + percent / 100) else WORSE
    return Verdict(name, state, golden_s, run_s, f"at most {percent:g}% more; {has / had - 1:+.1%}")


def checkpoint(run: Run) -> Verdict:
    """Whether the files of the newest checkpoint are those that were written."""
    from jaxtrain.checkpoint import CheckpointError, Checkpoints, files, folder_in  # imports jax, in seconds

    name = "newest checkpoint"
    if run.folder is None:
        return Verdict(name, NOT, "", "", "a receipt file alone has none")
    try:
        found = Checkpoints(folder_in(str(run.folder)))
        states = {step: state for step, state in found.states().items() if state != "unfinished"}
        if not states:
            return Verdict(name, NOT, "", "", f"{found.directory} holds none")
        step = max(states)
        found.meta(step)
        verdict = files.check(found.directory / str(step))
    except (CheckpointError, OSError) as error:
        return Verdict(name, WORSE, "", "", str(error))
    if verdict.problems:
        return Verdict(name, WORSE, "", f"step {step}", "; ".join(verdict.problems))
    if not verdict.proved:
        return Verdict(name, NOT, "", f"step {step}", "no integrity.json, so its files prove nothing")
    read = f"every file as it was written, {verdict.bytes / 2**20:,.1f} MiB read; verified, not restored"
    return Verdict(name, OK, "", f"step {step}", read)


def passed(verdicts: Sequence[Verdict]) -> bool:
    """Nothing is worse, the loss was compared, and both runs are done: a check of nothing, or of half a run, is no proof."""
    return not any(v.state == WORSE for v in verdicts) and not unproved(verdicts)


def unproved(verdicts: Sequence[Verdict]) -> list[str]:
    """Why nothing is proved even where nothing is worse."""
    why = {LOSS_NAME: "the losses could not be compared", END: "not both runs ended with 0"}
    return [why[v.name] for v in verdicts if v.name in why and v.state == NOT]


def record(verdicts: Sequence[Verdict], run: Run, golden: Run) -> dict[str, Any]:
    """The verdicts, for programs and for the run's folder. `step`: the last whose loss was there to be compared."""
    checks = [dataclasses.asdict(verdict) for verdict in verdicts]
    when = {"time": now(), "step": max(run.losses, default=None)}
    return {"passed": passed(verdicts), "run": run.name, "golden": golden.name, **when, "checks": checks}


def keep(found: Mapping[str, Any], run: Run) -> str:
    """Writes a record into the run's folder; returns why not, "" where it is written, or the run is a receipt file alone."""
    if run.folder is None:
        return ""
    path = run.folder / VERDICT
    if path.exists() and "checks" not in (run.checked or {}):
        return f"{path} is there already, and is no verdict of a check: the verdict was not kept. Move that file away."
    try:
        write_atomic(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:  # a folder that may only be read: the verdict stands all the same
        return f"the verdict was not kept: {error}"
    return ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
