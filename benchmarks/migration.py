"""Writes the tables of docs/coming_from.md and docs/migration.md, from jaxtrain/config/other_trainers.toml.

python -m benchmarks.migration          print the tables
python -m benchmarks.migration --write  write them into the pages, between their markers
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config.synonyms import OTHER_UNIT, other_trainers, synonym_pairs

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "coming_from.md", DOCS / "migration.md")
FLAGS = other_trainers()["migration"]
DERIVED = "derived"  # the batch of one GPU has no key in jaxtrain


def tables() -> dict[str, str]:
    """Return name -> Markdown table: one for each trainer, and "flags", those that users set first."""
    rows = {trainer: list(_rows(topics)) for trainer, topics in other_trainers()["tables"].items()}
    flags = [[_link(setting), *(flag(trainer, setting) for trainer in FLAGS["trainers"])] for setting in FLAGS["settings"]]
    found = {trainer: _table([trainer, "jaxtrain", "note"], each) for trainer, each in rows.items()}
    return found | {"flags": _table(["jaxtrain", *FLAGS["trainers"]], flags)}


def _rows(topics: dict[str, list[list[str]]]) -> Iterator[list[str]]:
    for topic, rows in topics.items():
        yield [f"**{topic}**", "", ""]
        yield from ([*row, ""][:3] for row in rows)


def _link(setting: str) -> str:
    return f"[{DERIVED}](#difference-1-the-batch)" if setting == DERIVED else f"`{setting}`"


def flag(trainer: str, setting: str) -> str:
    """Return the flag of a trainer for a setting; "" if there is none.

    If several flags fit, a usual one has precedence, then the flag that corresponds to the fewest keys. The result keeps a
    dagger of its row. If the setting is in steps and the flag is not, a star follows the flag.
    """
    found: list[tuple[bool, int, str]] = []
    for row in (row for rows in other_trainers()["tables"][trainer].values() for row in rows):
        for name, settings in synonym_pairs(row):
            keys = {each.partition("=")[0] for each in settings}
            fits = setting in keys if setting != DERIVED else row[1] == DERIVED and "batch" in name
            star = r"\*" if setting.endswith("steps") and OTHER_UNIT.search(name) else ""
            dagger = " †" if re.search(f"`{re.escape(name)}([ =][^`]*)?` †", row[0]) else ""
            found += [(name not in FLAGS["usual"], len(keys), f"`{name}`{star}{dagger}")] * fits
    return min(found, key=lambda one: one[:2])[2] if found else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def page(path: Path) -> str:
    """Return a page with its current tables."""
    text, found = path.read_text(), tables()
    marked = re.compile(
        r"(<!-- python -m benchmarks.migration --write: ([^>]*) -->\n).*?(<!-- end of the table -->\n)", re.DOTALL
    )
    return marked.sub(lambda match: match[1] + found[match[2]] + match[3], text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.migration", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write the tables into the pages")
    return out


def main() -> int:
    """Print the tables; with --write, write them into the pages."""
    if parser().parse_args().write:
        for path in PAGES:
            path.write_text(page(path))
    else:
        print(*tables().values(), sep="\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
