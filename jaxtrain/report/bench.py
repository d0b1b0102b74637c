"""Results of benchmarks: tables for a terminal, and a folder with results.md, results.json, receipt.json and logs/."""

import json
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
from rich.text import Text

from jaxtrain.config import hardware
from jaxtrain.config.command_line import INTERRUPTED
from jaxtrain.config.installed import versions
from jaxtrain.config.numbers import percent
from jaxtrain.metrics.files import write_atomic
from jaxtrain.metrics.receipt import Receipt, checkout, local_time
from jaxtrain.report import tables
from jaxtrain.report.tables import Table
from jaxtrain.train.child import OK

FORMAT = 2  # version of --json and results.json
WIDTH = 150  # columns of an output that is not a terminal
NO_MEASUREMENT = "CPU: this tests the command; the figures mean nothing"


def bench_facts(devices: hardware.Devices) -> dict[str, Any]:
    """Return date, machine, versions, commit and command, without starting JAX, because the cases need the GPU's memory."""
    commit, dirty = checkout()
    return {
        "date": local_time(),
        "device": devices.name,
        "platform": devices.kind,
        "count": devices.count,
        "memory_gib": devices.memory_gib,
        "python": platform.python_version(),
        "packages": versions(),
        "git": {"commit": commit, "dirty": dirty},
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

# Facts of a case that are columns of the table of several cases.
COLUMNS = ("step s", "quartiles", "tokens/s", "a device", "MFU causal", "MFU full", "HFU", "peak GiB", "compile s")


def step_facts(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the facts of train steps, without those that are unknown. answer: of train_step.measure."""
    out = {}
    if "mesh" in answer:
        mesh = " x ".join(f"{axis} {n}" for axis, n in answer["mesh"].items() if n > 1) or "one device"
        out |= {
            "devices": f"{answer['devices']['count']} x {', '.join(answer['devices']['kind'])}; mesh: {mesh}",
            "model": f"{answer['parameters']:,} parameters, precision {answer['precision']}, remat.policy {answer['remat']}",
            "kept": answer["remat_auto"],
            "batch": f"{answer['global_batch']} x {answer['seq_len']:,} tokens in {answer['grad_accum']} microbatches, "
            f"{answer['data']} data",
            "attention": f"{answer['attention']} ({answer['attention_reason']})",
        }
    out["compile s"] = number(answer.get("compile_s"), ".1f")
    if answer["verdict"] != OK:
        return out | {"result": f"{answer['verdict']}: {answer['why']}"}
    step_s, memory, planned = answer["step_s"], answer["memory"], answer["planned"] or {}
    within = ", {:.3g} to {:.3g} s expected".format(*planned["range_s"]) if planned.get("range_s") else ""
    without_graphs = answer.get("trace") and answer["compiler_options"].get("xla_gpu_enable_command_buffer") == ""
    return out | {
        "step s": beside_plan(step_s["median"], planned.get("step_s")),
        "quartiles": f"{step_s['q1']:.4g} to {step_s['q3']:.4g}",
        "extremes": f"{step_s['min']:.4g} to {step_s['max']:.4g}",
        "data ms": f"{1e3 * answer['data_wait_s']:.3g} of a step, waiting for data" if "data_wait_s" in answer else "",
        "tokens/s": f"{answer['tokens_per_s']:,.0f}",
        "a device": f"{answer['tokens_per_s_per_device']:,.0f}",
        "TFLOP/s": f"{answer['tflops_per_device']:,.4g} a device, causal; peak {number(answer['peak_tflops'])}",
        "MFU causal": percent(answer["mfu_causal"]),
        "MFU full": percent(answer["mfu_full"]),
        "HFU": percent(answer["hfu"]),
        "peak GiB": beside_plan(memory["peak_gib"], planned.get("peak_gib"), ".2f"),
        "limit GiB": number(memory["budget_gib"], ".2f"),
        "plan": f"{planned['rates']}{within}" if planned else answer["not_planned"],
        "loss": f"{answer['loss']['first']:.4f} first, {answer['loss']['last']:.4f} last",
        "trace": answer.get("trace", ""),
        "CUDA graphs": "off in all steps: a trace does not name their kernels" if without_graphs else "",
        "result": f"{answer['steps']} steps after {answer['warmup']}",
    }


def step_table(title: str, answers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of train steps: a case per row; of a single case, all facts, a fact per row.

    Args:
        answers: name of the case -> answer of train_step.measure.
    """
    facts = {name: step_facts(r) for name, r in answers.items()}
    if len(facts) > 1:
        rows = [[name, *(fields.get(column, "-") for column in COLUMNS), fields["result"]] for name, fields in facts.items()]
        return make_table(title, ("case", *COLUMNS, ""), rows)
    ((name, fields),) = facts.items()
    return make_table(title, ("case", name), [pair for pair in fields.items() if pair[1] not in ("", "-")])


def step_result(answer: Mapping[str, Any]) -> str:
    """Return the result of a case of train steps in one line."""
    facts = step_facts(answer)
    if answer["verdict"] != OK:
        return facts["result"]
    names = ("step s", "tokens/s", "MFU causal", "peak GiB", "compile s")
    return ", ".join(f"{name} {facts[name]}" for name in names if facts[name] != "-")


# ---- Tables and pages


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> Table:
    """Return a table without the columns that are empty in every row, such as MFU on a CPU. The first `text` columns stay."""
    rows = list(rows)
    indices = [i for i in range(len(headings)) if i < text or {row[i] for row in rows} - {"-", ""}]
    return tables.text_table(title, [headings[i] for i in indices], [[row[i] for i in indices] for row in rows])


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


def markdown_page(title: str, facts: Mapping[str, Any], lines: Iterable[str]) -> str:
    """Return the Markdown page of a benchmark. facts: result of `bench_facts`. lines: the page below the facts."""
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


class BenchFolder:
    """The outputs of --out and --json. `__init__` starts the receipt, and `write` rewrites all results.

    Without --out, `run` deletes the folder at the end. devices: those of this machine.
    """

    def __init__(self, out: str, file: str, kind: str):
        self.path = Path(out).expanduser().absolute() if out else Path(tempfile.mkdtemp(prefix="bench-"))
        self.file = Path(file).expanduser().absolute() if file else None
        self.is_kept = bool(out)
        self.devices = hardware.probe()
        facts = bench_facts(self.devices)
        self.results: dict[str, Any] = {"format": FORMAT, "kind": kind, "about": facts}
        self.receipt = Receipt(self.path)
        devices = {key: facts[key] for key in ("platform", "device", "count", "memory_gib")}
        self.receipt.start({"bench": kind, "devices": devices})

    def log(self, name: str) -> Path:
        """Return the file for the output of a case or program."""
        return self.path / "logs" / f"{file_name(name)}.txt"

    def write(self, title: str, lines: Iterable[str], **results: Any) -> None:
        """Write the page with `lines` to results.md, and all results so far to results.json and the file of --json."""
        self.results |= results
        text = json.dumps(self.results, indent=1) + "\n"
        if self.file:
            write_atomic(self.file, text)
        write_atomic(self.path / "results.json", text)
        write_atomic(self.path / "results.md", markdown_page(title, self.results["about"], lines))

    def print_cpu_note(self, console: rich.console.Console) -> None:
        """Print a note that figures of a CPU mean nothing, if this machine has no GPU."""
        if self.devices.kind == "cpu":
            print_line(console, NO_MEASUREMENT, "dim")

    def run(self, act: Callable[[], int], failure: str) -> int:
        """Run `act` and return its exit code. Write the end of the receipt, also after an exception.

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
            self.receipt.finish(code, reason)
            if not self.is_kept:
                shutil.rmtree(self.path, ignore_errors=True)
        return code
