"""The first thing to run on a node: is it well, and what does it reach? Each part has its share of half an hour.

A part is `ok`, `off` (slower or larger than planned: worth a look, no fault), `FAILED`, or `left out` with the reason. The
suite fails where a part failed.
"""

import dataclasses
import datetime
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.bench import check, experts, report
from jaxtrain.bench.case import LATE, NO_MEMORY, OK, apart, last_words, program
from jaxtrain.bench.case import run as run_program
from jaxtrain.bench.measure import DATA
from jaxtrain.bench.parts import BAD, GOOD, OFF, OUT, Node, Outcome, Part, run_parts, summary
from jaxtrain.bench.report import Folder
from jaxtrain.parity import layouts
from jaxtrain.preflight import inspection
from jaxtrain.preflight.node import LocalNode
from jaxtrain.preflight.table import FAULT, Context

BUDGET_S = 1800.0  # of all parts together
APART_PEAK = 0.10  # planned and measured peak memory may differ by this much

# Shipped configs: file, sequences of a device at a time, microbatches. A whole batch would take minutes a step.
SHIPPED = (("llama3_1b", 4, 4), ("llama2_7b", 2, 4), ("llama3_8b", 1, 4), ("llama3_70b", 1, 1))
LAYOUTS = {
    8: layouts.DEFAULT,
    4: "one,data4,fsdp4,data2xfsdp2,fsdp2xtensor2,fsdp2xseq2,tensor2xseq2,tensor4",
    2: "one,data2,fsdp2,tensor2,seq2",
}
FEW = "one,fsdp8,fsdp2xtensor2xseq2"  # of a smoke test
TINY = f"--config={launch.DEFAULT_CONFIG}"
SMALL = tuple(f"--config.{o}" for o in ("model.num_layers=1", "model.d_model=32", "model.d_ff=64", "data.seq_len=32"))
# Heads that cuDNN takes, and rows of documents, so that the kernels of large runs are what is compared.
WIDER = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=64", "data.seq_len=512")
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def smoke_config(node: Node) -> list[str]:
    return [TINY, *SMALL, f"--config.train.global_batch={2 * node.devices.count}", *DATA["synthetic"]]


# ---- parts


def part_preflight(node: Node, limit_s: float) -> Outcome:
    """Whether the node is fit: GPUs, links, versions, host, environment. Only asked; the next part measures."""
    local = LocalNode({}, limit_s / 2)
    seen = Context(local, launch.load([]).run, {}, has_config=False)
    try:
        found = inspection.inspect(seen)
    finally:
        local.close()
    wrong = [f"{c.name} ({c.seen})" for c in found if c.state == FAULT]
    if node.devices.kind == "gpu" and not node.devices.count:
        wrong = [node.devices.source]
    rows = [[c.name, c.state, c.expected, c.seen] for c in found]
    text = f"wrong: {', '.join(wrong)}" if wrong else seen.gpus.absent or f"{node.devices.count} x {node.devices.name}"
    lines = report.markdown("Preflight", ("check", "state", "expected", "seen"), rows)
    return Outcome(BAD if wrong else GOOD, text, lines, [dataclasses.asdict(c) for c in found])


def part_rates(node: Node, limit_s: float) -> Outcome:
    """What GEMMs, attention, memory and links reach; plans of the parts after it use it."""
    if node.smoke:
        return Outcome(OUT, "a CPU has no plan to calibrate")
    code, said = run_program(program("plan", "--calibrate"), node.path / "logs" / "rates.txt", limit_s=limit_s)
    lines = ["## Rates", "", "```text", said.strip(), "```", ""]
    if code:
        return Outcome(BAD, last_words(said), lines)
    return Outcome(OUT if code is None else GOOD, "not done in time" if code is None else last_words(said), lines)


def part_kernels(node: Node, limit_s: float) -> Outcome:
    """Attention kernels against the definition."""
    return against_definition("attention", "Attention", check.HEADINGS, check.row, node, limit_s)


def part_experts(node: Node, limit_s: float) -> Outcome:
    """Products with the weights of experts against the definition."""
    return against_definition("experts", "Products with experts' weights", experts.HEADINGS, experts.row, node, limit_s)


def against_definition(
    case: str, title: str, headings: Sequence[str], row: Callable[[dict[str, Any]], list[str]], node: Node, limit_s: float
) -> Outcome:
    """What kernels come to that one of case.CASES compares with their definition."""
    answer = apart(case, {"limit_s": 0.8 * limit_s}, log=node.folder.log(f"{case} checked"), limit_s=limit_s)
    rows = answer.get("rows", [])
    lines = report.markdown(f"{title} against the definition", headings, map(row, rows))
    lines += ["Largest error, and in brackets its largest ratio to the bound that follows from the types (at most 1).", ""]
    wrong, right = answer.get("wrong", 0), answer.get("right", 0)
    text = f"{right} shapes within their bounds"
    if wrong:
        text = f"{wrong} of {wrong + right} shapes are beyond their bounds, or failed"
    elif answer["verdict"] not in (OK, LATE) or not right:
        text = answer["why"]
    if answer.get("left_out"):
        text += f"; for {answer['left_out']} there was no time"
    if answer["verdict"] == LATE:
        text += f"; {answer['why']}"
    good = OFF if answer["verdict"] == LATE and right and not wrong else BAD
    return Outcome(GOOD if answer["verdict"] == OK else good, text, lines, answer)


def part_parity(node: Node, limit_s: float) -> Outcome:
    """The same steps on several layouts."""
    count = node.devices.count
    meshes = FEW if node.smoke else next((text for n, text in LAYOUTS.items() if n <= count), "")
    if not meshes:
        return Outcome(OUT, "one device has one layout")
    wider = [f"--config.{o}" for o in WIDER]
    asked = {"f32": [*SMALL, "--steps=1"]} if node.smoke else {"f32": ["--dtype=f32"], "bf16": [*wider, "--dtype=bf16"]}
    data, texts, bad, late = {}, [], [], []
    began = time.monotonic()
    for name, more in asked.items():
        file = node.path / f"parity_{name}.json"
        command = program("parity", TINY, "--config.data.source=synthetic", *more)
        command += [f"--meshes={meshes}", f"--json={file}"]
        left = limit_s - (time.monotonic() - began)
        code, said = run_program(command, node.path / "logs" / f"parity_{name}.txt", limit_s=max(1.0, left))
        texts += [f"### {name}", "", "```text", said.strip(), "```", ""]
        if file.exists():
            data[name] = json.loads(file.read_text())
            bad += [f"{name} {r['name']}" for r in data[name]["layouts"] if r["verdict"] not in ("agrees", "reference")]
        if code is None:
            late.append(name)
        elif code and not file.exists():
            bad.append(f"{name}: {last_words(said)}")
    lines = ["## Parity of layouts", "", *texts]
    if bad:
        return Outcome(BAD, f"not the same steps: {', '.join(bad)}", lines, data)
    if late:
        return Outcome(OFF if data else BAD, f"{', '.join(late)} not done in time", lines, data)
    number = len(meshes.split(","))
    return Outcome(GOOD, f"{number} layouts take the same steps in {' and '.join(data)}", lines, data)


def part_configs(node: Node, limit_s: float) -> Outcome:
    """Shipped configs, 30 steps each or as many as there is time for; planned beside measured."""
    cases = [("tiny", smoke_config(node))] if node.smoke else [node.config(*c) for c in SHIPPED]
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for i, (name, argv) in enumerate(cases):
        share = (limit_s - (time.monotonic() - began)) / (len(cases) - i)
        found[name] = _steps(node, name, argv, share, (2, 1) if node.smoke else (25, 5))
    rows = [report.step_row(name, r) for name, r in found.items()]
    lines = report.markdown("Shipped configs", report.STEP_HEADINGS, rows)
    bad = [f"{name}: {r['why']}" for name, r in found.items() if r["verdict"] not in (OK, NO_MEMORY, LATE)]
    late = [f"{name}: {r['why']}" for name, r in found.items() if r["verdict"] == LATE]
    measured = [name for name, r in found.items() if r["verdict"] == OK]
    if bad:
        return Outcome(BAD, "; ".join(bad), lines, found)
    if not measured:
        return Outcome(BAD, "; ".join(["no shipped config was measured", *late]), lines, found)
    off = late + [text for name in measured for text in unlike_plan(name, found[name])]
    text = "; ".join(f"{n} {found[n]['tokens_per_s_per_device']:,.0f} tokens/s a device" for n in measured)
    return Outcome(OFF if off else GOOD, "; ".join([text, *off]), lines, found)


def unlike_plan(name: str, r: Mapping[str, Any]) -> list[str]:
    """Return a text for a step time that the plan does not expect, and for a peak that is more than APART_PEAK off.

    Nothing where there is no plan.
    """
    from jaxtrain.plan.expect import Expected  # imports JAX

    if not r.get("planned"):
        return []
    planned, step_s, peak_gib, out = Expected(**r["planned"]), r["step_s"]["median"], r["memory"]["peak_gib"], []
    if step_s and planned.is_unexpected(step_s):
        within = " ({:.3g} to {:.3g} s are expected)".format(*planned.range_s) if planned.range_s else ""
        out.append(f"{name}: step time {step_s / planned.step_s:.2f} times the plan{within}")
    if peak_gib and abs(peak_gib / planned.peak_gib - 1) > APART_PEAK:
        out.append(f"{name}: peak memory {peak_gib / planned.peak_gib:.2f} times the plan")
    return out


def part_checkpoint(node: Node, limit_s: float) -> Outcome:
    """A save and a restore, bit for bit."""
    argv = smoke_config(node) if node.smoke else node.config("llama3_1b", 1, 1)[1]
    folder = node.path / "checkpoint"
    ask = {"argv": argv, "devices": 0, "folder": str(folder)}
    try:
        answer = apart("save", ask, log=node.folder.log("checkpoint"), limit_s=limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes, and of use to nobody
    if answer["verdict"] != OK:
        return Outcome(BAD, answer["why"], data=answer)
    gib = answer["gib"]
    text = f"{gib:.3g} GiB in {answer['tensors']} tensors came back bit for bit; written in {answer['save_s']:.2g} s "
    text += f"(the loop waits {answer['blocked_s']:.2g} s), read in {answer['restore_s']:.2g} s"
    return Outcome(GOOD, text, ["## Checkpoint", "", text, ""], answer)


def part_connections(node: Node, limit_s: float) -> Outcome:
    """CUDA_DEVICE_MAX_CONNECTIONS unset against 1: how many queues a GPU's kernels and collectives are put in."""
    if not node.smoke and node.devices.count == 1:
        return Outcome(OUT, "one GPU has no collectives to overlap")
    # A loop over layers compiles soon, and what the two settings do to it they do to others.
    name, argv = ("tiny", smoke_config(node)) if node.smoke else node.config("llama3_1b", 4, 4)
    argv = [*argv, "--config.parallel.scan_layers=true"]
    found = {}
    for value in ("unset", "1"):
        environ = {k: v for k, v in os.environ.items() if k != MAX_CONNECTIONS}
        label = f"{name}, {MAX_CONNECTIONS} {value}"
        part = [] if value == "unset" else [f"--config.env.set={MAX_CONNECTIONS}={value}"]
        found[label] = _steps(node, label, [*argv, *part], limit_s / 2, (2, 1) if node.smoke else (10, 3), environ)
    lines = report.markdown(MAX_CONNECTIONS, report.STEP_HEADINGS, [report.step_row(n, r) for n, r in found.items()])
    bad = [f"{n}: {r['why']}" for n, r in found.items() if r["verdict"] not in (OK, NO_MEMORY, LATE)]
    if bad:
        return Outcome(BAD, "; ".join(bad), lines, found)
    if any(r["verdict"] != OK for r in found.values()):
        return Outcome(OUT, f"{name} does not fit, or not in time", lines, found)
    unset, one = (r["step_s"]["median"] for r in found.values())
    return Outcome(GOOD, f"a step takes {unset:.4g} s unset, {one:.4g} s with 1 ({one / unset - 1:+.1%})", lines, found)


def part_run(node: Node, limit_s: float) -> Outcome:
    """configs/tiny.py through the command line, from text to a sample."""
    folder = node.path / "run"
    small = [f"--config.train.global_batch={2 * node.devices.count}", "--config.train.steps=4"] if node.smoke else []
    small += ["--config.optimizer.warmup_steps=1", "--config.eval.sequences=8", "--config.sample.max_tokens=4"] * node.smoke
    command = program("main", TINY, *(SMALL if node.smoke else ()), *small, f"--workdir={folder}")
    code, said = run_program(command, node.path / "logs" / "run.txt", limit_s=limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    lines = ["## configs/tiny.py through the command line", "", "```text", *said.strip().splitlines()[-25:], "```", ""]
    if code != 0:
        return Outcome(BAD, "not done in time" if code is None else f"exit code {code}: {last_words(said)}", lines)
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    return Outcome(GOOD, f"trained, evaluated (loss {last['loss']:.3f}), saved and sampled", lines, last)


def _steps(
    node: Node,
    name: str,
    argv: list[str],
    limit_s: float,
    steps: tuple[int, int],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    ask = {"argv": argv, "devices": 0, "steps": steps[0], "warmup": steps[1]}
    # The process needs some time to end after its last step.
    return apart("steps", ask | {"limit_s": 0.8 * limit_s}, log=node.folder.log(name), environ=environ, limit_s=limit_s)


# Part -> (what it does, seconds at most). Together they are below BUDGET_S.
PARTS: dict[str, tuple[Callable[[Node, float], Outcome], float]] = {
    "preflight": (part_preflight, 20),
    "rates": (part_rates, 120),
    "kernels": (part_kernels, 300),
    "parity": (part_parity, 300),
    "configs": (part_configs, 540),
    "checkpoint": (part_checkpoint, 180),
    "connections": (part_connections, 210),
    "run": (part_run, 120),
}


# ---- all of it


def run(out: str, file: str, parts: str, smoke: bool, console: rich.console.Console) -> int:
    """Runs the parts and returns the exit code: 0 all well, 1 a part failed.

    `out` "" is a new folder under runs/. Beside the folder stands the same as one .tar.gz, to be sent in.
    """
    devices = hardware.probe()
    smoke = smoke or devices.kind != "gpu"
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Folder(out or f"runs/node-{stamp}", file, "suite")
    node = Node(devices, smoke, folder)
    chosen = [Part(name, *PARTS[name]) for name in PARTS if not parts or name in parts.split(",")]

    def last(done: Mapping[str, Any]) -> None:
        packed = shutil.make_archive(str(node.path), "gztar", node.path.parent, node.path.name)
        report.say(console, f"{node.path}, and as one file to send in: {packed}")

    return run_parts(chosen, node, console, BUDGET_S, "A node", summary, last)
