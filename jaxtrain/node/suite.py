"""Check that a node computes correctly, and measure its speed, in at most half an hour (`--suite=node`).

Each part has a time limit (PARTS). Its verdict is `ok`, `off`, `FAILED`, or `left out` with the reason. `off` is no fault: time
or memory differs from the plan, or the part ran out of time. The suite fails if a part failed.
"""

import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from jaxtrain.config import hardware, launch
from jaxtrain.config.durations import duration
from jaxtrain.node import train_step
from jaxtrain.node.train_step import DATA
from jaxtrain.report import bench
from jaxtrain.report.tables import Table
from jaxtrain.train import parity_layouts
from jaxtrain.train.child import FAILED, LATE, OK, REFUSED, error_line, jaxtrain_command, last_lines, run_case, run_program

GOOD, OFF, BAD, OUT = "ok", "off", "FAILED", "left out"
STYLES = {BAD: "bold red", OFF: "yellow"}
BUDGET_S = 1800.0  # for all parts together
PEAK_ERROR = 0.10  # tolerated relative difference of measured from planned peak memory

# Shipped configs: (file, sequences per device and microbatch, microbatches). With the full batch, a step would take minutes.
SHIPPED = (("llama3_1b", 4, 4), ("llama2_7b", 2, 4), ("llama3_8b", 1, 4), ("llama3_70b", 1, 1))
LAYOUTS = {
    8: parity_layouts.DEFAULT,
    4: "one,data4,fsdp4,data2xfsdp2,fsdp2xtensor2,fsdp2xseq2,tensor2xseq2,tensor4",
    2: "one,data2,fsdp2,tensor2,seq2",
}
SMOKE_LAYOUTS = "one,fsdp8,fsdp2xtensor2xseq2"
TINY = f"--config={launch.DEFAULT_CONFIG}"
SMALL = tuple(f"--config.{o}" for o in ("model.num_layers=1", "model.d_model=32", "model.d_ff=64", "data.seq_len=32"))
# A model with a head size that cuDNN supports, so that parity compares the kernels of large runs.
WIDER = ("model.d_model=512", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=64", "data.seq_len=512")
# Of a run that does nothing but take two steps, and save its state.
SAVED = ("--config.train.steps=2", "--config.checkpoint.every_steps=0", "--config.sample.max_tokens=0")
GPU_TESTS = launch.REPO / "tests" / "gpu"


# ---- The runner of parts, also of benchmarks/first_minutes.py


@dataclasses.dataclass(frozen=True)
class PartOutcome:
    """The result of a part.

    Attributes:
      verdict: GOOD, OFF, BAD or OUT (left out). OFF is no fault: the result differs from the plan or is incomplete.
      found: the result in one line.
      lines: Markdown lines of the part's section in results.md.
      data: the result as JSON data.
    """

    verdict: str
    found: str
    lines: list[str] = dataclasses.field(default_factory=list)
    data: Any = None


class Node(bench.BenchFolder):
    """The output folder of parts.

    smoke: whether to use tiny shapes. cache: folder for compiled programs; "": none; None: the folder of the config.
    """

    def __init__(self, out: str, file: str, kind: str, smoke: bool, cache: str | None = None):
        super().__init__(out, file, kind)
        self.smoke, self.cache = smoke, cache

    def run_program(
        self, name: str, command: list[str], limit_s: float, environ: Mapping[str, str] | None = None
    ) -> tuple[int | None, PartOutcome]:
        """Run a program as a part. Return (exit code, or None after a timeout; outcome, GOOD if the code is 0, else BAD)."""
        code, output = run_program(command, self.log(name), environ=environ, limit_s=max(1.0, limit_s))
        lines = [f"## {name}", "", "```text", *output.strip().splitlines()[-60:], "```", ""]
        if code == 0:
            return code, PartOutcome(GOOD, last_lines(output).rpartition(" | ")[2], lines)
        return code, PartOutcome(BAD, "not done in time" if code is None else f"exit code {code}: {last_lines(output)}", lines)


@dataclasses.dataclass(frozen=True)
class SuitePart:
    """A part of a measurement, of at most `most_s` seconds. It is left out if less than `need_s` of the budget are left.

    gate: if this part fails, no further part runs.
    """

    name: str
    act: Callable[[Node, float], PartOutcome]
    most_s: float
    need_s: float = 1.0
    gate: bool = False

    def run(self, node: Node, limit_s: float) -> PartOutcome:
        """Run the part. After an exception the outcome is BAD, and the traceback is saved in logs/."""
        if limit_s < self.need_s:
            return PartOutcome(OUT, f"{duration(limit_s)} were left, and it needs {duration(self.need_s)}")
        try:
            return self.act(node, limit_s)
        except Exception as error:
            log = node.log(f"{self.name}_error")
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            return PartOutcome(BAD, f"{error_line(error)} ({log})")


def run_parts(
    parts: Sequence[SuitePart],
    node: Node,
    console: rich.console.Console,
    budget_s: float,
    title: str,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run the parts in `budget_s` seconds. Return the exit code: 0, or 1 if a part failed. KeyboardInterrupt passes through.

    After each part, all results so far are in the output folder, with those of parts that it had before, and `after` is called.
    """
    outcomes: dict[str, dict[str, Any]] = node.results.setdefault("parts", {})
    began, failed, i = time.monotonic(), False, 0
    try:
        for i, part in enumerate(parts, 1):
            started = time.monotonic()
            limit = min(part.most_s, budget_s - (started - began))
            about = f"part {i} of {len(parts)}: {part.name}, at most {duration(limit)}; {duration(started - began)} gone"
            bench.print_line(console, about, "dim")
            with console.status(part.name):
                outcome = part.run(node, limit)
            times = {"seconds": time.monotonic() - started, "budget_s": max(0.0, limit)}
            outcomes[part.name] = dataclasses.asdict(outcome) | times
            bench.print_line(console, f"  {outcome.verdict}: {outcome.found}", STYLES.get(outcome.verdict, ""))
            sections = [line for p in outcomes.values() for line in p["lines"]]
            lines = [f"**{verdict(outcomes)}**", "", *bench.markdown(make_table(outcomes)), *sections]
            node.write(title, lines, verdict=verdict(outcomes))
            after()
            failed |= outcome.verdict == BAD
            if part.gate and outcome.verdict == BAD:
                break
        i = 0  # none was interrupted
    finally:
        if outcomes:
            bench.print_table(console, make_table(outcomes))
            stopped = f"stopped in part {i} of {len(parts)}; so far " if i else ""
            bench.print_line(console, stopped + verdict(outcomes), "bold red" if failed or i else "bold green")
    return int(failed)


def verdict(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the verdict on all parts in one line."""
    failed = [f"{name} ({p['found']})" for name, p in outcomes.items() if p["verdict"] == BAD]
    if failed:
        return f"FAULT: {'; '.join(failed)}"
    off = [name for name, p in outcomes.items() if p["verdict"] == OFF]
    return "no fault" + (f"; worth a look: {', '.join(off)}" if off else "")


def make_table(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of parts."""
    rows = [[name, p["verdict"], duration(p["seconds"]), duration(p["budget_s"]), p["found"]] for name, p in outcomes.items()]
    return bench.make_table("Parts", ("part", "", "took", "of at most", "result"), rows)


# ---- Configs


def smoke_config(node: Node) -> list[str]:
    """Return the command line of a tiny config on all devices of the node."""
    return [TINY, *SMALL, f"--config.train.global_batch={2 * node.devices.count}", *DATA["synthetic"]]


def shipped_config(node: Node, name: str, micro: int, accum: int) -> tuple[str, list[str]]:
    """Return (name in tables, command line) of a shipped config on the GPUs of the node. name, micro, accum: see SHIPPED."""
    count = node.devices.count
    variant = "half" if name == "llama3_8b" and count == 1 else f"gpus={count}"
    batch = [f"--config.train.global_batch={count * micro * accum}", f"--config.train.grad_accum={accum}"]
    return f"{name}:{variant}", [f"--config={launch.REPO}/configs/{name}.py:{variant}", *batch, *DATA["synthetic"]]


# ---- Parts


def check_health(node: Node, limit_s: float) -> PartOutcome:
    """Check GPUs, links, versions, host and environment by preflight, without measuring."""
    command = jaxtrain_command("preflight", "--no-measure", f"--json={node.path / 'preflight.json'}")
    return node.run_program("Preflight", command, limit_s)[1]


def calibrate(node: Node, limit_s: float) -> PartOutcome:
    """Measure rates of matmuls, attention, memory and links, for the plans of the later parts."""
    if node.smoke:
        return PartOutcome(OUT, "plans are made for GPUs")
    code, outcome = node.run_program("Rates", jaxtrain_command("plan", "--calibrate"), limit_s)
    return PartOutcome(OUT, outcome.found, outcome.lines) if code is None else outcome


def run_gpu_tests(node: Node, limit_s: float, name: str = "Kernels", only: Sequence[str] = ("",)) -> PartOutcome:
    """Compare attention, grouped matmuls and FP8 matmuls with their definitions (tests/gpu).

    No test starts in the last fifth of `limit_s`. A test that still runs after `limit_s` is a fault, since it may hang.

    only: files of tests/gpu, or FILE::TEST; "": all files.
    """
    if not GPU_TESTS.is_dir() or importlib.util.find_spec("pytest") is None:
        return PartOutcome(OUT, "tests/gpu or pytest is missing. Fix: JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu")
    file = node.log(name).with_suffix(".jsonl")
    file.unlink(missing_ok=True)
    environ = {"JAXTRAIN_TEST_DEVICE": "" if node.smoke else "gpu", "JAXTRAIN_TEST_RESULTS": str(file)}
    environ["JAXTRAIN_TEST_SECONDS"] = str(0.8 * limit_s)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command += [str(GPU_TESTS / target) for target in only]
    code, outcome = node.run_program(name, command, limit_s, os.environ | environ)
    results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    passed, failed = ([r for r in results if r["outcome"] == kind] for kind in ("passed", "failed"))
    unfinished = [r for r in results if "no time was left" in r["why"]]
    text = f"{len(passed)} tests passed, {len(failed)} failed" + (f", {len(unfinished)} had no time" if unfinished else "")
    if ratios := [r["ratio"] for r in results if "ratio" in r]:
        text += f"; error at most {max(ratios):.2f} of its bound"
    if failed:
        text += f"; first {failed[0]['test']}: {failed[0]['why']}"
    elif code != 0:
        text += f"; {outcome.found}"
    verdict = BAD if failed or code != 0 or not passed else OFF if unfinished else GOOD
    rows = [[r["test"], r["outcome"], f"{r['ratio']:.2f}" if "ratio" in r else "", r["why"]] for r in results]
    table = bench.make_table(f"{name} against their definitions", ("test", "", "error / bound", ""), rows)
    return PartOutcome(verdict, text, bench.markdown(table) + outcome.lines * (verdict == BAD), results)


def check_parity(node: Node, limit_s: float) -> PartOutcome:
    """Train the same steps on several layouts and compare them."""
    count = node.devices.count
    meshes = SMOKE_LAYOUTS if node.smoke else next((text for n, text in LAYOUTS.items() if n <= count), "")
    if not meshes:
        return PartOutcome(OUT, "one device has one layout")
    wider = [f"--config.{o}" for o in WIDER]
    cases = {"f32": [*SMALL, "--steps=1"]} if node.smoke else {"f32": ["--dtype=f32"], "bf16": [*wider, "--dtype=bf16"]}
    data, lines, texts, codes = {}, [], [], []
    began = time.monotonic()
    for name, options in cases.items():
        file = node.path / f"parity_{name}.json"
        file.unlink(missing_ok=True)  # an earlier suite may have written it
        command = jaxtrain_command("parity", TINY, "--config.data.source=synthetic", *options)
        command += [f"--meshes={meshes}", f"--json={file}"]
        code, outcome = node.run_program(f"Parity {name}", command, limit_s - (time.monotonic() - began))
        data |= {name: json.loads(file.read_text(encoding="utf-8"))} if file.exists() else {}
        lines += outcome.lines
        texts.append(f"{name}: {outcome.found}")
        codes.append(code)
    verdict = BAD if any(codes) or not data else OFF if None in codes else GOOD  # without any result, a collective may hang
    return PartOutcome(verdict, "; ".join(texts), lines, data)


def time_configs(node: Node, limit_s: float) -> PartOutcome:
    """Time shipped configs for 30 steps each, or as many as fit into the time, and compare them with their plans."""
    cases = [("tiny", smoke_config(node))] if node.smoke else [shipped_config(node, *c) for c in SHIPPED]
    answers: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    steps: dict[str, Any] = {"steps": 2, "warmup": 1} if node.smoke else {"steps": 25, "warmup": 5}
    for i, (name, argv) in enumerate(cases):
        share = (limit_s - (time.monotonic() - began)) / (len(cases) - i)
        answers[name] = time_steps(node, name, argv, share, **steps)
    lines = bench.markdown(bench.step_table("Shipped configs", answers))
    ended = {r["verdict"] for r in answers.values()}
    off = [f"{name} {text}" for name, r in answers.items() for text in differences_from_plan(r)]
    text = "; ".join([*(f"{name}: {bench.step_result(r)}" for name, r in answers.items()), *off])
    verdict = BAD if {FAILED, REFUSED} & ended or OK not in ended else OFF if off or LATE in ended else GOOD
    return PartOutcome(verdict, text, lines, answers)


def differences_from_plan(answer: Mapping[str, Any]) -> list[str]:
    """Return a text for an unexpected step time (`Expected.is_unexpected`), and one for a peak memory off by over PEAK_ERROR.

    Without a plan, return []. answer: of train_step.measure.
    """
    from jaxtrain.plan.expect import Expected  # imports JAX

    if not answer.get("planned"):
        return []
    planned, step_s, peak_gib, out = Expected(**answer["planned"]), answer["step_s"]["median"], answer["memory"]["peak_gib"], []
    if planned.is_unexpected(step_s):
        within = " ({:.3g} to {:.3g} s are expected)".format(*planned.range_s) if planned.range_s else ""
        out.append(f"takes {step_s / planned.step_s:.2f} times the planned time{within}")
    if peak_gib and abs(peak_gib / planned.peak_gib - 1) > PEAK_ERROR:
        out.append(f"has {peak_gib / planned.peak_gib:.2f} times the planned peak memory")
    return out


def train_and_restore(name: str, node: Node, limit_s: float, argv: Sequence[str]) -> PartOutcome:
    """Train by the command line, restore the last state in another process, and read the files of the state again.

    The restore compares the digests of every tensor with those of the saved state.
    """
    folder, deadline, lines = node.path / f"suite_{name}", time.monotonic() + limit_s, []
    shutil.rmtree(folder, ignore_errors=True)  # an earlier suite may have written it
    train = jaxtrain_command("main", *argv, f"--workdir={folder}")
    verify = jaxtrain_command("checkpoint", "verify", str(folder))
    try:
        for act, command in (("train", train), ("restore", train), ("verify", verify)):
            code, outcome = node.run_program(f"{name} {act}", command, deadline - time.monotonic())
            lines += outcome.lines
            if code != 0:
                return PartOutcome(BAD, f"{act}: {outcome.found}", lines)
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a checkpoint has gigabytes
    receipt = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    lines_of_run = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = [line for line in lines_of_run if "loss" in line][-1]
    restore, waited_s = receipt.get("restore", {}), receipt["goodput"]["parts_s"]["save"]
    if restore.get("digests") != "matched":
        return PartOutcome(BAD, "the second process did not restore what the first has saved", lines, last)
    text = f"loss {last['loss']:.3f}; training waited {waited_s:.2g} s for saves; restored bit for bit in "
    text += f"{restore['seconds']:.2g} s; {outcome.found}"
    return PartOutcome(GOOD, text, lines, last | {"restore": restore, "waited_s": waited_s})


def check_checkpoint(node: Node, limit_s: float) -> PartOutcome:
    """Save and restore the state of llama3_1b, and compare it bit for bit."""
    argv = smoke_config(node) if node.smoke else shipped_config(node, "llama3_1b", 1, 1)[1]
    return train_and_restore("checkpoint", node, limit_s, [*argv, *SAVED])


def train_tiny(node: Node, limit_s: float) -> PartOutcome:
    """Run configs/tiny.py through the command line, from text to a sample."""
    small = [*SMALL, f"--config.train.global_batch={2 * node.devices.count}", "--config.train.steps=4"]
    small += ["--config.optimizer.warmup_steps=1", "--config.eval.sequences=8", "--config.sample.max_tokens=4"]
    return train_and_restore("run", node, limit_s, [TINY, *(small if node.smoke else ())])


def time_steps(
    node: Node, name: str, argv: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None, **request: Any
) -> dict[str, Any]:
    """Return the answer of train_step.measure for the config of `argv`. request: further fields of the request to `measure`."""
    # The process needs some time to end after its last step.
    request = {"devices": 0, "argv": [*argv], "limit_s": 0.8 * limit_s, **request}
    return run_case(train_step.CASE, request, log=node.log(name), environ=environ, limit_s=limit_s)


# The sum of their seconds is below BUDGET_S.
PARTS = (
    SuitePart("preflight", check_health, 20),
    SuitePart("rates", calibrate, 120),
    SuitePart("kernels", run_gpu_tests, 300),
    SuitePart("parity", check_parity, 300),
    SuitePart("configs", time_configs, 540),
    SuitePart("checkpoint", check_checkpoint, 300),
    SuitePart("run", train_tiny, 150),
)


def run_suite(out: str, file: str, parts: str, smoke: bool, console: rich.console.Console) -> int:
    """Run the suite, and pack its folder into one .tar.gz. Return 0, or 1 if a part failed.

    Args: the values of --out ("": a new folder under runs/), --json, --parts ("": all) and --smoke.
    """
    out = out or f"runs/node-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    node = Node(out, file, "suite", smoke or hardware.probe().kind != "gpu")
    chosen = [part for part in PARTS if not parts or part.name in parts.split(",")]
    try:
        return node.run(lambda: run_parts(chosen, node, console, BUDGET_S, "A node"), "a part failed")
    finally:
        packed = shutil.make_archive(str(node.path), "gztar", node.path.parent, node.path.name)
        bench.print_line(console, f"{node.path}, and as one file to send in: {packed}")
