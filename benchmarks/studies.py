"""Shared parts of the studies that write documentation pages from plans: well-known models, planning, and writing a page.

A page has two parts. The text above `MARK` is written by hand. The text below it is written by the study:

    python -m benchmarks.published --write           docs/evidence/planned_vs_published.md
    python -m benchmarks.what_fits --write           docs/evidence/what_fits.md
    python -m benchmarks.collective_volumes --write  docs/evidence/collectives.md
    python -m benchmarks.limits --write              docs/evidence/limits.md
    python -m benchmarks.finetuning --write          docs/evidence/lora.md

Without --write a study prints its part. No GPU is needed. Finished plans are cached, so that a study can be stopped and
restarted.
"""

import argparse
import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config import hardware, installed, launch
from jaxtrain.models import preset
from jaxtrain.models.families.llama import PRESETS
from jaxtrain.plan import FOLDER
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search_cache import PlanCache
from jaxtrain.plan.search_parallel import PlanOutcome, Request, plan_many
from jaxtrain.runtime.startup import start_jax

MARK = "<!-- The rest of this page is written by its command, which is at its end. -->\n"


@dataclasses.dataclass(frozen=True)
class Model:
    """A well-known model.

    Attributes:
        keys: keys of config.Model.
        seq_len: tokens of a sequence in the model's pretraining.
        source: publication of the model's sizes.
    """

    name: str
    keys: dict[str, Any]
    seq_len: int
    source: str


def _llama(layers: int, width: int, heads: int, kv_heads: int, d_ff: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "num_kv_heads": kv_heads, "d_ff": d_ff}
    return sizes | {"vocab_size": vocab} | more


MODELS = {
    "llama2_7b": Model("Llama 2 7B", PRESETS["llama2_7b"], 4096, "arXiv 2307.09288"),
    "llama2_13b": Model("Llama 2 13B", _llama(40, 5120, 40, 40, 13824, 32000), 4096, "arXiv 2307.09288"),
    "llama_30b": Model("llama-shaped 30B", _llama(60, 6656, 52, 52, 17920, 32000), 4096, "LLaMA 33B, arXiv 2302.13971"),
    "llama2_70b": Model("Llama 2 70B", _llama(80, 8192, 64, 8, 28672, 32000), 4096, "arXiv 2307.09288"),
    "llama3_8b": Model("Llama 3 8B", PRESETS["llama3_8b"], 8192, "arXiv 2407.21783"),
    "llama3_70b": Model("Llama 3 70B", PRESETS["llama3_70b"], 8192, "arXiv 2407.21783"),
    # GPT-3's layers, width and heads. Three SwiGLU matrices of 8/3 times the width replace two matrices of 4 times the width.
    "llama_175b": Model("llama-shaped 175B", _llama(96, 12288, 96, 96, 32768, 50304), 4096, "GPT-3, arXiv 2005.14165"),
    # Falcon's layers, width and heads, with SwiGLU too: 39,595 is rounded up to a multiple of 256. head_dim is 64.
    "llama_180b": Model("llama-shaped 180B", _llama(80, 14848, 232, 8, 39680, 65024), 4096, "Falcon-180B, arXiv 2311.16867"),
    "llama3_405b": Model(
        "Llama 3 405B", _llama(126, 16384, 128, 8, 53248, 128256, rope_base=500_000.0), 8192, "arXiv 2407.21783"
    ),
    "qwen3_30b_a3b": Model("Qwen3 30B-A3B", preset("qwen3_30b_a3b"), 4096, "arXiv 2505.09388"),
}


def make_parser(study: str, doc: str) -> argparse.ArgumentParser:
    """Return the parser of a study's options. doc: docstring of the study's module."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{study}", description=doc.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page, instead of printing its part")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at a time; default: one for each core")
    parser.add_argument("--cache", default=FOLDER, help="folder of finished plans; default %(default)s")
    return parser


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Start JAX on CPUs. Return the keyword arguments of `plan_many` for the options --jobs and --cache."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    start_jax(hardware.probe())
    return {"jobs": args.jobs, "cache": PlanCache(args.cache)}


def plan_all(requests: Mapping[str, Request], **how: Any) -> dict[str, Plan]:
    """Plan all requests and return name -> plan. Print the outcome of each request.

    Raises:
        SystemExit: a plan could not be made. The reason is printed.
    """

    def print_outcome(name: str, outcome: PlanOutcome) -> None:
        print(f"{name}: {outcome.kind}{f': {outcome.reason}' if outcome.reason else ''}", flush=True)

    outcomes = plan_many(dict(requests), on_done=print_outcome, **how)
    plans = {name: outcome.plan for name, outcome in outcomes.items() if outcome.plan}
    if len(plans) < len(requests):
        raise SystemExit(1)
    return plans


def footer(command: str, versions: Mapping[str, str] | None = None, date: str = "") -> list[str]:
    """Return the last lines of a page: command, date and versions; by default the current date and versions."""
    named = ", ".join(f"{name} {version}" for name, version in (versions or installed.versions()).items())
    made = date or datetime.date.today().isoformat()
    return ["", "## How this page was made", "", "```text", command, "```", "", f"On {made}, with {named}."]


def publish(page: str, lines: Sequence[str], write: bool) -> None:
    """Write the generated part of a page of the repository, or print this part if `write` is false.

    Args:
        page: path of the page, such as docs/evidence/what_fits.md. Its text above MARK is kept.
        lines: the generated part.
    """
    text = "\n".join(lines) + "\n"
    if not write:
        print(text, end="")
        return
    path = launch.REPO / page
    path.write_text(path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + text, encoding="utf-8")
    print(f"wrote {path}")


def generated(page: str) -> str:
    """Return the generated part of a page."""
    return Path(launch.REPO / page).read_text(encoding="utf-8").partition(MARK)[2]
