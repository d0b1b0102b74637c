"""The parts of a receipt as rows of a name and a value, for the terminal and for the page of a run."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtrain.config import flatten
from jaxtrain.receipt.lineage import beginning, lineage
from jaxtrain.receipt.lineage import described as described_origin
from jaxtrain.receipt.opened import Run, source_of
from jaxtrain.receipt.settings import variables
from jaxtrain.receipt.things import described

NOTHING = "not measured"
Rows = list[tuple[str, Any]]


def parts(run: Run, titles: Iterable[str] = ()) -> list[tuple[str, Rows]]:
    """(heading, rows of name and value) of each part, or of some. Raises ReceiptError where a file that a part needs cannot be
    read."""
    return [(title, PARTS[title](run)) for title in titles or PARTS]


def ended(attempt: Mapping[str, Any], *, newest: bool = True) -> str:
    """When it began, and how it ended. newest: no other attempt came after it, so that it may be running still."""
    if attempt.get("exit_code") is None:
        return f"started {attempt.get('started')}, no end: killed{', or still running' if newest else ''}"
    return f"{attempt.get('started')} to {attempt.get('ended')}, exit code {attempt['exit_code']}: {attempt['reason']}"


def _what(run: Run) -> Rows:
    r, source = run.receipt, source_of(run.receipt)
    state = {True: ", with changes that are not committed", False: "", None: ""}[source.get("dirty")]
    rows = [("command", r.get("command")), ("receipt", r.get("id")), ("host", (r.get("host") or {}).get("name"))]
    rows.append(("config", f"{r.get('config')}, sha256 {str(r.get('config_sha256'))[:12]}"))
    rows += [(f"  {key}", value) for key, value in (r.get("overrides") or {}).items()]
    rows.append(("commit", f"{source['commit']}{state}" if source.get("commit") else source.get("error", "not in git")))
    if source.get("files"):
        rows.append(("source", f"{len(source['files'])} files, {len(source.get('patch') or '')} characters of a patch"))
    past, origin = lineage(run.attempts)
    rows.append(("began with", described_origin(beginning(r))))
    if past[1:]:
        rows.append((f"attempt {past[0].get('attempt')} began with", described_origin(origin)))
        rows.append(("its steps are of", f"attempts {', '.join(str(one.get('attempt')) for one in past)}"))
    rows += [("launch", ", ".join(f"{k}: {v}" for k, v in (r.get("launch") or {}).items()))] if r.get("launch") else []
    data = r.get("data") or {}
    rows.append(("data", data.get("source", "not told") if not r.get("synthetic") else "synthetic: made-up tokens"))
    rows += [(f"  {f['name']}", f"{f['tokens']:,} tokens, sha256 {f['content_sha256'][:12]}") for f in data.get("files", ())]
    mesh = r.get("mesh") or {}
    rows.append(("mesh", " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "not told"))
    rows.append(("attention", r.get("attention", "not told")))
    return rows


def _versions(run: Run) -> Rows:
    r = run.receipt
    below = {name: value for name, value in flatten(r.get("versions") or {}) if value is not None}
    whole = {"jaxtrain": r.get("jaxtrain"), "python": r.get("python"), **below, **(r.get("packages") or {})}
    return [(name, version) for name, version in whole.items() if version is not None]


def _hardware(run: Run) -> Rows:
    """What it is, and its GPUs as one look at the start and one at the end found them."""
    rows: Rows = [*described(run.told).items()]
    for when in ("before", "after"):
        for gpu in (run.receipt.get("hardware") or {}).get(when) or ():
            if gpu.get("lost"):
                rows.append((f"GPU {gpu['index']} {when}", "lost: the driver does not reach it"))
                continue
            told = {"MHz": gpu["sm_clock_mhz"], "W": gpu["power_w"], "C": gpu["temperature_c"]}
            said = ", ".join(f"{value:g} {unit}" for unit, value in told.items() if value is not None)
            rows.append((f"GPU {gpu['index']} {when}", f"{said}; throttled by {gpu['throttle_reasons'] or 'nothing'}"))
    return rows or [("", "not told")]


def _environment(run: Run) -> Rows:
    return [*variables(run.receipt).items()] or [("", "nothing set that changes a run")]


def _preflight(run: Run) -> Rows:
    found = run.receipt.get("preflight")
    if not found:
        return [("", "there was none")]
    if "error" in found:
        return [("", found["error"])]
    rows: Rows = [("verdict", f"{found['verdict']}, in {found['seconds']:.1f} s")]
    for node in found.get("nodes", ()):
        wrong = [check["name"] for check in node.get("checks", ()) if check["state"] == "FAULT"]
        rows += [(f"{node['host']}: faults", ", ".join(wrong))] if wrong else []
        rows += [(f"{node['host']}: {name}", value) for name, value in flatten(node.get("measured") or {})]
    return rows


def _speed(run: Run) -> Rows:
    speed, ratio = run.figures["speed"] or {}, run.figures.get("measured_over_planned") or {}
    planned, compile_s = run.receipt.get("planned") or {}, run.receipt.get("compile_s")
    compiled = [("compiled in", f"{compile_s:.1f} s")] if compile_s else []
    if not speed or not speed["step_time_s"]:
        return [("", f"{NOTHING}: {speed.get('why', 'no lines of metrics')}"), *compiled]
    step, window = speed["step_time_s"], speed["window"]
    rows = [
        ("step time", f"median {step['median']:.4g} s, p10 {step['p10']:.4g} s, p90 {step['p90']:.4g} s"),
        ("window", f"steps {window['first_step']} to {window['last_step']}, {window['lines']} lines: {window['rule']}"),
        ("tokens/s/device", f"{speed['tokens_per_s_per_device']:,.0f}; all devices {speed['tokens_per_s']:,.0f}"),
        ("TFLOP/s/device", f"{speed['tflops_per_device']:.4g}" if speed["tflops_per_device"] else NOTHING),
    ]
    if speed["mfu_causal"]:
        shares = ", ".join(f"{name} {speed[name]:.2%}" for name in ("mfu_causal", "mfu_full", "hfu") if speed[name])
        rows.append(("utilisation", f"{shares}; of a peak of {speed['peak_tflops']:.5g} TFLOP/s"))
    if planned:
        times = f", measured over planned {ratio['step_s']:.3f}" if ratio.get("step_s") else ""
        expected = "{:.4g} to {:.4g} s a step expected, roofline ".format(*planned["range_s"]) if planned.get("range_s") else ""
        rows.append(("planned", f"{expected}{planned['step_s']:.4g} s a step ({planned['rates']}){times}"))
    return [*rows, *compiled, *((f"  {name}", text) for name, text in speed["formula"].items())]


def _memory(run: Run) -> Rows:
    memory, planned = run.figures["memory"] or {}, (run.receipt.get("planned") or {}).get("peak_gib")
    words = {"peak_gib": "peak", "in_use_gib": "in use", "pool_gib": "pool", "compiler_peak_gib": "peak, by the compiler"}
    rows = [(what, f"{memory[name]:.3f} GiB" if memory.get(name) is not None else NOTHING) for name, what in words.items()]
    rows += [("peak, planned", f"{planned:.3f} GiB")] if planned else []
    return rows + [(f"  {name}", f"{gib:.3f} GiB") for name, gib in (run.receipt.get("memory_gib") or {}).items()]


def _loss(run: Run) -> Rows:
    return [(f"step {step}", value) for step, value in (run.figures["loss_at"] or {}).items()] or [("", NOTHING)]


def _saves(run: Run) -> Rows:
    r = run.receipt
    saves, restore = r.get("saves"), r.get("restore")
    rows: Rows = [("saves", "none")]
    if saves:
        long = f"median {saves['seconds']['median']:.3g} s, longest {saves['seconds']['max']:.3g} s"
        waited = f"the loop waited {saves['loop_waited_s']:.3g} s in all"
        rows = [("saves", f"{saves['count']}: {long}, {saves['gb_per_s']:.3g} GB/s, {waited}")]
    if restore:
        return [*rows, ("restore", f"step {restore['step']} in {restore['seconds']:.3g} s, digests {restore['digests']}")]
    at = r.get("resumed_from_step")
    said = "not tested: this attempt read no checkpoint" if at is None else f"from step {at}; no more is told"
    return [*rows, ("restore", said)]


def _golden(run: Run) -> Rows:
    found = run.checked
    if not found or "error" in found:
        return [("", found["error"] if found else "not checked against one")]
    verdict = "as good as" if found["passed"] else "NOT proved as good as"
    rows = [("verdict", f"{verdict} {found['golden']}, checked {found['time']} at step {found['step']}")]
    return rows + [(f"  {each['name']}", f"{each['state']}: {each['rule']}") for each in found["checks"]]


def _goodput(run: Run) -> Rows:
    found = run.goodput
    if not found or found["goodput"] is None:
        return [("", NOTHING)]
    rows = [("goodput", f"{found['goodput']:.1%} of {found['wall_s']:.1f} s in {_counted(found['attempts'])}")]
    return rows + [(f"  {cause}", f"{seconds:.1f} s") for cause, seconds in found["parts_s"].items() if seconds]


def _counted(attempts: int) -> str:
    return f"{attempts} attempt{'' if attempts == 1 else 's'}"


def _attempts(run: Run) -> Rows:
    return [(str(a.get("attempt", n)), ended(a, newest=n == len(run.attempts))) for n, a in enumerate(run.attempts, 1)]


PARTS: dict[str, Callable[[Run], Rows]] = {
    "What ran": _what,
    "Versions": _versions,
    "Hardware": _hardware,
    "Environment": _environment,
    "Preflight": _preflight,
    "Speed": _speed,
    "Memory": _memory,
    "Loss": _loss,
    "Saves and restore": _saves,
    "Golden run": _golden,
    "Goodput": _goodput,
    "Attempts": _attempts,
}
