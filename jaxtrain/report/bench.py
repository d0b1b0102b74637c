"""Results of benchmarks: tables for a terminal, and a folder with results.md, results.json, receipt.json and logs/."""

import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
from rich.text import Text

from jaxtrain.config import hardware, launch
from jaxtrain.config.command_line import INTERRUPTED
from jaxtrain.config.durations import duration
from jaxtrain.config.installed import versions
from jaxtrain.config.numbers import percent
from jaxtrain.metrics.files import write_atomic
from jaxtrain.metrics.receipt import Receipt, now
from jaxtrain.report import tables
from jaxtrain.report.tables import Table
from jaxtrain.runtime.provenance import checkout
from jaxtrain.train.child import OK

FORMAT = 1  # version of --json and results.json
WIDTH = 150  # columns of an output that is not a terminal
NO_MEASUREMENT = "CPU: this tests the command; the figures mean nothing"


def about() -> dict[str, Any]:
    """Return date, machine, versions, commit and command, without starting JAX, because the cases need the GPU's memory."""
    found = hardware.probe()
    commit, dirty, _ = checkout(launch.REPO)
    return {
        "date": now(),
        "device": found.name,
        "platform": found.kind,
        "count": found.count,
        "memory_gib": found.memory_gib,
        "python": platform.python_version(),
        "packages": versions(),
        "git": {"commit": commit or None, "dirty": dirty == "yes"},
        "command": shlex.join(sys.orig_argv),
    }


def number(value: float | None, form: str = ",.4g") -> str:
    """Format a figure; "-" if it is unknown."""
    return "-" if value is None else format(value, form)


def beside_plan(measured: float | None, planned: float | None, form: str = ",.4g") -> str:
    """Format a measured figure. If a planned figure is known, add the ratio of both: `12.3 (1.04 x plan)`."""
    if measured is None or not planned:
        return number(measured, form)
    return f"{measured:{form}} ({measured / planned:.2f} x plan)"


# ---- Train steps


def step_table(title: str, answers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of train steps. A case that failed has the reason in the last column.

    Args:
        answers: name of the case -> answer of train_step.measure.
    """
    headings = ("case", "step s", "quartiles", "tokens/s", "a device", "MFU causal", "MFU full", "HFU", "peak GiB", "compile s")
    rows = []
    for name, r in answers.items():
        compile_s = number(r.get("compile_s"), ".1f")
        if r["verdict"] != OK:
            rows.append([name, *["-"] * 8, compile_s, f"{r['verdict']}: {r['why']}"])
            continue
        s, planned = r["step_s"], r["planned"] or {}
        cells = [beside_plan(s["median"], planned.get("step_s")), f"{s['q1']:.4g} to {s['q3']:.4g}"]
        cells += [f"{r['tokens_per_s']:,.0f}", f"{r['tokens_per_s_per_device']:,.0f}"]
        cells += [percent(r[key]) for key in ("mfu_causal", "mfu_full", "hfu")]
        cells += [beside_plan(r["memory"]["peak_gib"], planned.get("peak_gib"), ".2f"), compile_s]
        rows.append([name, *cells, f"{r['steps']} steps after {r['warmup']}"])
    return make_table(title, (*headings, ""), rows)


def step_result(r: Mapping[str, Any]) -> str:
    """Return the result of a case of train steps in one line."""
    if r["verdict"] != OK:
        return f"{r['verdict']}: {r['why']}"
    return f"{beside_plan(r['step_s']['median'], (r['planned'] or {}).get('step_s'))} s, {r['tokens_per_s']:,.0f} tokens/s"


def step_details(name: str, r: Mapping[str, Any]) -> Table:
    """Return the table of a single case of train steps, a fact per row. Facts unknown for this device are left out."""
    planned, rows = r.get("planned"), [["case", name]]
    if "mesh" in r:
        mesh = " x ".join(f"{axis} {n}" for axis, n in r["mesh"].items() if n > 1) or "one device"
        rows += [
            ["devices", f"{r['devices']['count']} x {', '.join(r['devices']['kind'])}; mesh: {mesh}"],
            ["model", f"{r['parameters']:,} parameters, precision {r['precision']}, remat.policy {r['remat']}"],
            ["batch", f"{r['global_batch']} x {r['seq_len']:,} tokens in {r['grad_accum']} microbatches, {r['data']} data"],
            ["attention", f"{r['attention']} ({r['attention_reason']})"],
            ["compile", duration(r["compile_s"])],
        ]
    if r.get("remat_auto"):
        rows.append(["kept", r["remat_auto"]])
    if r["verdict"] != OK:
        return make_table("Details", ("", ""), [*rows, [r["verdict"], r["why"]]])
    s, memory = r["step_s"], r["memory"]
    rows += [
        ["step", f"{s['median']:.4g} s, median of {r['steps']} after {r['warmup']} to warm up"],
        ["", f"quartiles {s['q1']:.4g} to {s['q3']:.4g} s, extremes {s['min']:.4g} to {s['max']:.4g} s"],
        ["waiting for data", f"{1e3 * r['data_wait_s']:.3g} ms of a step"],
        ["tokens/s", f"{r['tokens_per_s']:,.0f}; {r['tokens_per_s_per_device']:,.0f} a device"],
        ["TFLOP/s a device", f"{r['tflops_per_device']:,.4g} causal"],
    ]
    if r["peak_tflops"]:
        rows[-1][1] += f"; the peak is {r['peak_tflops']:,.4g}"
        causal, full, hfu = (percent(r[key]) for key in ("mfu_causal", "mfu_full", "hfu"))
        rows.append(["MFU", f"{causal} causal, {full} full; HFU {hfu} (causal)"])
    if memory["peak_gib"] is not None:
        rows.append(["peak memory", f"{memory['peak_gib']:.2f} GiB of {number(memory['budget_gib'], '.2f')}, by the allocator"])
    if planned:
        rows.append(["planned step", f"{beside_plan(s['median'], planned.get('step_s'))} ({planned['rates']})"])
        rows.append(["planned peak", beside_plan(memory["peak_gib"], planned.get("peak_gib"), ".2f")])
    elif r.get("devices", {}).get("platform") != ["cpu"]:  # plans are made for GPUs
        rows.append(["not planned", r["not_planned"]])
    rows.append(["loss", f"{r['loss']['first']:.4f} first, {r['loss']['last']:.4f} last"])
    if r.get("trace"):
        rows.append(["trace", r["trace"]])
        if r.get("compiler_options", {}).get("xla_gpu_enable_command_buffer") == "":
            rows.append(["", "the steps were timed without CUDA graphs, whose kernels a trace does not name"])
    return make_table("Details", ("", ""), rows)


# ---- Tables and pages


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> Table:
    """Return a table without the columns that are empty in every row, such as MFU on a CPU.

    The first `text` columns and the last column are text. All other columns are figures, aligned to the right.
    """
    cells = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in headings]
    last = len(headings) - 1
    columns = [
        tables.Column(heading, cells[i], kind="" if i < text or i == last else "number")
        for i, heading in enumerate(headings)
        if i < text or {*cells[i]} - {"-", ""}
    ]
    return Table(title, columns)


def print_table(console: rich.console.Console, table: Table) -> None:
    """Print a table without its title."""
    tables.print_table(table, console, with_title=False)


def print_line(console: rich.console.Console, text: str, style: str = "") -> None:
    """Print a line without wrapping or markup."""
    console.print(Text(text, style=style), soft_wrap=True)


def markdown(table: Table) -> list[str]:
    """Return a section with a table, as lines of Markdown."""
    rows = zip(*([cell.replace("|", "\\|") for cell in c.cells] for c in table.columns), strict=True)
    return [f"## {table.title}", "", *tables.markdown_table([c.heading for c in table.columns], rows), ""]


def page(title: str, facts: Mapping[str, Any], lines: Iterable[str]) -> str:
    """Return the Markdown page of a benchmark. facts: result of `about`. lines: the page below the facts."""
    git = facts["git"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    head = [
        f"# {title}",
        f"{facts['date']}; {facts['count']} x {facts['device']}, {facts['memory_gib']:.1f} GiB each; "
        f"Python {facts['python']}; {packages}",
        f"commit {git['commit'] or 'unknown'}{', with changes' if git['dirty'] else ''}; `{facts['command']}`",
        *([f"**{NO_MEASUREMENT}.**"] if facts["platform"] == "cpu" else []),
    ]
    return "\n\n".join(head) + "\n\n" + "\n".join([*lines, ""])


def file_name(name: str) -> str:
    """Return the name of a case as a valid file name."""
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in name)[:120]


class Folder:
    """The outputs of --out and --json. `__init__` starts the receipt, and `write` rewrites all results."""

    def __init__(self, out: str, file: str, kind: str):
        self.path = Path(out).expanduser().absolute() if out else None
        self.file = Path(file).expanduser().absolute() if file else None
        self.results: dict[str, Any] = {"format": FORMAT, "kind": kind, "about": about()}
        self.receipt = Receipt(self.path) if self.path else None
        if self.receipt:
            facts = self.results["about"]
            devices = {key: facts[key] for key in ("platform", "device", "count", "memory_gib")}
            self.receipt.start({"bench": kind, "devices": devices})

    def log(self, name: str) -> Path | None:
        """Return the file for a case's output; None without --out."""
        return self.path / "logs" / f"{file_name(name)}.txt" if self.path else None

    def trace(self, name: str) -> str:
        """Return the folder for a case's trace; "" without --out."""
        return str(self.path / "traces" / file_name(name)) if self.path else ""

    def write(self, title: str, lines: Iterable[str], **results: Any) -> None:
        """Write the page with `lines` to results.md, and all results so far to results.json and the file of --json."""
        self.results |= results
        text = json.dumps(self.results, indent=1) + "\n"
        if self.file:
            write_atomic(self.file, text)
        if self.path:
            write_atomic(self.path / "results.json", text)
            write_atomic(self.path / "results.md", page(title, self.results["about"], lines))

    def print_cpu_note(self, console: rich.console.Console) -> None:
        """Print a note that figures of a CPU mean nothing, if this machine has no GPU."""
        if self.results["about"]["platform"] == "cpu":
            print_line(console, NO_MEASUREMENT, "dim")

    def run(self, act: Callable[[], int], failure: str) -> int:
        """Run `act` and return its exit code. Close the receipt, also after an exception.

        Args:
            act: returns the exit code.
            failure: reason in the receipt if the exit code is not 0.
        """
        code, reason = 1, "ended by an exception"
        try:
            code = act()
            reason = failure if code else "done"
        except KeyboardInterrupt:
            code, reason = INTERRUPTED, "Ctrl-C"
            raise
        finally:
            self.finish(code, reason)
        return code

    def finish(self, code: int, reason: str) -> None:
        """Write exit code and reason to the receipt, and close it."""
        if self.receipt:
            self.receipt.finish(code, reason)
