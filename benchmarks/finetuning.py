"""Plan adapters of well-known models on 1 to 8 GPUs, with frozen bases of 16, 8 and 4 bits: docs/evidence/lora.md.

    python -m benchmarks.finetuning [--write]

A row is one plan of configs/finetune.py, with adapters of rank 16 and 32 x 8192 tokens in a step. --write also writes the table
of docs/finetuning.md. tests/golden has the figures of the plans that fit.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import studies
from jaxtrain.config import launch
from jaxtrain.config.numbers import number, percent, rough
from jaxtrain.data import loading
from jaxtrain.plan import rates
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search_parallel import Request
from jaxtrain.report.tables import markdown_table

PAGE, USERS_PAGE = "docs/evidence/lora.md", "docs/finetuning.md"
COMMAND = "python -m benchmarks.finetuning --write"
RANK = 16
NAMES = {
    "llama3.1_8b": "Llama 3.1 8B",
    "llama3.1_70b": "Llama 3.1 70B",
    "llama3.1_405b": "Llama 3.1 405B",
    "qwen3_30b_a3b": "Qwen3 30B-A3B",
    "gpt_oss_120b": "GPT-OSS 120B",
}
BASES = ("bf16", "fp8", "nf4", "mxfp4")
# (model, machine, formats of its base that fit, formats that do not)
PLANNED = (
    ("llama3.1_8b", "h100:1", ("bf16", "fp8", "nf4"), ()),
    ("llama3.1_70b", "h100:1", ("nf4",), ()),
    ("llama3.1_70b", "h200:1", ("fp8", "nf4"), ("bf16",)),
    ("llama3.1_70b", "h100:8", ("bf16", "fp8", "nf4"), ()),
    ("llama3.1_405b", "h100:8", (), ("nf4",)),
    ("llama3.1_405b", "h200:8", ("fp8", "nf4"), ("bf16",)),
    ("qwen3_30b_a3b", "h100:1", ("nf4",), ()),
    ("qwen3_30b_a3b", "h100:8", ("nf4",), ()),
    ("gpt_oss_120b", "h100:1", (), ("mxfp4",)),
    ("gpt_oss_120b", "h200:1", ("mxfp4",), ()),
    ("gpt_oss_120b", "h200:8", ("mxfp4",), ()),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A base on a machine."""

    model: str
    machine: str
    base: str
    fits: bool

    @property
    def name(self) -> str:
        """Return the name of the golden plan."""
        return f"lora_{self.model}_{self.base}_on_{self.machine.replace(':', '_')}".replace(".", "_")

    @property
    def config(self) -> str:
        """Return the config file with its variant."""
        gpus = machines.parse_topology(self.machine).total
        return f"configs/finetune.py:model={self.model},lora={RANK},frozen={self.base},gpus={gpus}"

    @property
    def request(self) -> Request:
        """Return the request for the plan, at published kernel rates."""
        run, where = loading.load_config([f"--config={launch.REPO / self.config}"]).run, machines.parse_topology(self.machine)
        return Request(run, where, self.config, rates=rates.datasheet(where.gpu, run.precision))


CASES = tuple(
    Case(model, machine, base, base in fit) for model, machine, fit, others in PLANNED for base in BASES if base in fit + others
)


# ---- The pages

HEADINGS = ("model", "GPUs", "base", "GiB of a GPU", "of", "parameters", "saved activations", "roofline tokens/s", "MFU causal",
            "MFU full", "kept")  # fmt: skip


def cells(case: Case, plan: Plan) -> list[str]:
    """Return the cells of a row under HEADINGS. Without enough memory it has no speed."""
    m, t = plan.memory, plan.time
    held = [m.taken_gib, m.usable_gib, *(m.by_class.get(kind, 0.0) for kind in ("parameters", "saved activations"))]
    speed = [rough(t.tokens_per_s, 4), percent(t.mfu_causal), percent(t.mfu_full), kept(plan)]
    return [NAMES[case.model], case.machine, case.base, *(number(n, 1) for n in held), *(speed if plan.fits else ["-"] * 4)]


def kept(plan: Plan) -> str:
    """Return the activations that remat.policy=auto saves."""
    return plan.kept.partition(" keeps ")[2] or "each layer's input"


def short_table(plans: Mapping[Case, Plan]) -> list[str]:
    """Return the table for users: a row for each model and machine, and a column for each format."""
    found = {(case.model, case.machine, case.base): plan for case, plan in plans.items()}

    def cell(plan: Plan | None) -> str:
        if plan is None:
            return ""
        held, of = plan.memory.taken_gib, plan.memory.usable_gib
        return f"{held:.0f} / {rough(plan.time.tokens_per_s)}" if plan.fits else f"needs {held:.0f}, has {of:.0f}"

    rows = dict.fromkeys((case.model, case.machine) for case in plans)
    return markdown_table(
        ("model", "GPUs", *BASES),
        [[NAMES[m], where, *(cell(found.get((m, where, base))) for base in BASES)] for m, where in rows],
    )


def page(plans: Mapping[Case, Plan]) -> list[str]:
    """Return the generated lines of the page."""
    return ["", *markdown_table(HEADINGS, [cells(*row) for row in plans.items()]), *studies.footer(COMMAND)]


def write_short(lines: Sequence[str]) -> None:
    """Replace the table of the users' page."""
    path = launch.REPO / USERS_PAGE
    text = path.read_text(encoding="utf-8")
    old = re.compile(rf"^{re.escape(lines[0])}\n(\|.*\n)+", re.MULTILINE)
    path.write_text(old.sub(lambda _: "\n".join(lines) + "\n", text), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the plans, and print or write the tables. Return the exit code."""
    args = parser().parse_args(argv)
    how = studies.start(args)
    made = studies.plan_all({case.name: case.request for case in CASES}, **how)
    plans = {case: made[case.name] for case in CASES}
    if args.write:
        write_short(short_table(plans))
    else:
        print("\n".join(short_table(plans)))
    studies.publish(PAGE, page(plans), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("finetuning", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
