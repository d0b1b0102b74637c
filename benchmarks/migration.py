"""Writes the table of docs/migration.md: the flags that users set first in four trainers, and the keys of jaxtrain.

python -m benchmarks.migration          print the table
python -m benchmarks.migration --write  write it into docs/migration.md, between its markers

The names of flags come from the tables of docs/coming_from.md, the keys from jaxtrain/config/synonyms.py.
"""

import argparse
import re
import sys
from pathlib import Path

from jaxtrain.config.synonyms import INDEX, OTHER_UNIT

REPO = Path(__file__).resolve().parents[1]
SOURCE, PAGE = REPO / "docs" / "coming_from.md", REPO / "docs" / "migration.md"
BEGIN, END = "<!-- python -m benchmarks.migration --write -->\n", "<!-- end of the table -->\n"
TRAINERS = ("MaxText", "torchtitan", "Megatron-LM", "Hugging Face")
DERIVED = "derived"  # the batch of one GPU has no key in jaxtrain
SETTINGS = (
    *("mesh.fsdp", "mesh.tensor", "mesh.seq", "mesh.stage", "mesh.expert"),
    *("train.global_batch", DERIVED, "train.grad_accum", "data.seq_len", "train.steps"),
    *("optimizer.lr", "optimizer.warmup_steps", "precision", "remat.policy", "data.source"),
    *("data.tokenizer", "init.from", "--workdir", "checkpoint.every_steps", "log.every_steps"),
)
# The usual flag, if several flags have the same meaning.
USUAL = {
    *("gradient_accumulation_steps", "--recompute-granularity", "--dump_folder", "grain_train_files"),
    *("per_device_train_batch_size", "--tokenizer-model"),
}


def rows(trainer: str) -> list[tuple[str, str]]:
    """Return (flags of the trainer, settings of jaxtrain) of each row of its table in docs/coming_from.md."""
    (table,) = re.findall(rf"^\| {trainer} \| jaxtrain \| note \|\n\|---.*\n((?:\|.*\n)+)", SOURCE.read_text(), re.MULTILINE)
    return [(line.split("|")[1], line.split("|")[2]) for line in table.splitlines()]


def flag(trainer: str, setting: str) -> str:
    """Return the flag of a trainer for a setting; "" if there is none.

    If several flags fit, a flag in USUAL has precedence, then the flag that corresponds to the fewest keys. The result keeps a
    dagger of docs/coming_from.md. If the setting is in steps and the flag is not, a star follows the flag.
    """
    found: list[tuple[bool, int, str]] = []
    for theirs, ours in rows(trainer):
        for name, dagger in re.findall(r"`(-*\w[^ =`]*)[^`]*`( †)?", theirs):
            keys = {s.partition("=")[0] for s in INDEX.get(name.lstrip("-").replace("-", "_"), ())}
            if setting == DERIVED:
                fits = ours.strip() == DERIVED and "batch" in name
            else:
                fits = setting in keys and f"`{setting}" in ours
            star = r"\*" if setting.endswith("steps") and OTHER_UNIT.search(name) else ""
            found += [(name not in USUAL, len(keys), f"`{name}`{star}{dagger}")] * fits
    return min(found, key=lambda one: one[:2])[2] if found else ""


def table() -> str:
    """Return the Markdown table: a row for each of SETTINGS, a column for each of TRAINERS."""
    lines = [f"| jaxtrain | {' | '.join(TRAINERS)} |", "|---" * (1 + len(TRAINERS)) + "|"]
    for setting in SETTINGS:
        cells = [
            f"[{DERIVED}](#difference-1-the-batch)" if setting == DERIVED else f"`{setting}`",
            *(flag(trainer, setting) for trainer in TRAINERS),
        ]
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/migration.md with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.migration", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/migration.md")
    return out


def main() -> int:
    """Print the table; with --write, write it into docs/migration.md."""
    if parser().parse_args().write:
        PAGE.write_text(page())
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
