"""Continue a text with a trained model: `python -m jaxtrain.sample --workdir=runs/tiny --prompt="def "`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from jaxtrain import config, hardware, stores
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.command_line import Command, Option, Parsed, run_command
from jaxtrain.config import Problem
from jaxtrain.startup import start_jax


def _number(allowed: Callable[[float], bool], rule: str) -> Callable[[str], str]:
    """Return a check of an option's text. It returns "" for an allowed number, or the broken rule."""

    def check(text: str) -> str:
        try:
            return "" if allowed(float(text)) else rule
        except ValueError:
            return "must be a number"

    return check


OWN = "default: as in the run's config"
COMMAND = Command(
    "sample",
    "Continue a text with a trained model.",
    (
        Option("workdir", "a run's folder, or one of its checkpoints/<step>", "DIR"),
        Option("prompt", f"the text to continue; several are separated by || ({OWN})", "TEXT"),
        Option("max-tokens", f"tokens to generate at most ({OWN})", "N", least=1),
        Option(
            "temperature",
            f"0: the most likely token ({OWN})",
            "T",
            check=_number(lambda t: t >= 0, "must be 0 or more"),
            example="0.8",
        ),
        Option(
            "top-p",
            f"probability mass to draw from ({OWN})",
            "P",
            check=_number(lambda p: 0 < p <= 1, "must be above 0 and at most 1"),
            example="0.9",
        ),
        Option("seed", f"seed of the draws ({OWN})", "N", least=0),
        Option("tokenizer", "the tokenizer's present path, if it moved since training", "PATH"),
        Option("base", "of a run with adapters: the base model's present path, if it moved", "DIR"),
    ),
    examples=('--workdir=runs/tiny --prompt="def "',),
    notes="Exit codes: 0 done; 2 the command is wrong, or there is no checkpoint that can be read.",
)
TYPES = {"prompt": str, "max_tokens": int, "temperature": float, "top_p": float, "seed": int}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # ValueError is raised for a layout that is impossible on these devices.
    return run_command(COMMAND, argv, _act, check=_check, errors=(CheckpointError, ValueError))


def _check(parsed: Parsed) -> list[Problem]:
    workdir = parsed.options["workdir"]
    if not workdir:
        known = "workdir" in parsed.given or parsed.has_strays
        return [] if known else [Problem("--workdir", None, "is missing", "For example --workdir=runs/tiny.")]
    rule, _, remedy = stores.missing(workdir).partition(". ")
    return [Problem("--workdir", workdir, rule, remedy)] if rule else []


def _act(parsed: Parsed) -> int:
    options = parsed.options
    given = {name: kind(text) for name, kind in TYPES.items() if (text := options[name.replace("_", "-")])}
    return generate_texts(options["workdir"], options["tokenizer"], options["base"], given)


def generate_texts(workdir: str, tokenizer_path: str, base: str, given: dict[str, object]) -> int:
    """Print each prompt with its continuation, and return the exit code.

    Args:
        given: fields of config.Sample that override the run's config.
    """
    start_jax(hardware.probe())
    # Imported here: `--help` and wrong options must be fast, and the platform must be set before jax is imported.
    import jax

    from jaxtrain.data.tokenizer import load_tokenizer
    from jaxtrain.generation import continue_all, load

    run, sampler, params, step = load(workdir, jax.local_devices(), base)
    tokenizer = load_tokenizer(tokenizer_path or run.data.tokenizer)
    print(f"[{workdir.rstrip('/')}, step {step}]", file=sys.stderr)
    # A run that writes no samples has max_tokens = 0.
    ask = dataclasses.replace(run.sample, **{"max_tokens": run.sample.max_tokens or config.Sample().max_tokens, **given})
    texts = continue_all(sampler, params, tokenizer, ask)
    print(*texts, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
