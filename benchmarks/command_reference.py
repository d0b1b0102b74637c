"""Writes docs/commands.md: every command with its usage and its options, from the commands' parsers.

python -m benchmarks.command_reference          print the page
python -m benchmarks.command_reference --write  write docs/commands.md
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from jaxtrain.config import commands
from jaxtrain.config.command_line import Parser

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "commands.md"
OPTION = re.compile(r"(?<![\w`-])(--[a-z][\w.-]*(?:=[^\s;)]+)?(?<![.,:]))")  # an option in a sentence
HEAD = """# Commands

`./run.sh COMMAND` runs a command in the environment that it prepares; inside it `python -m jaxtrain COMMAND` is the same.
Each has `--help`. [config.md](config.md) lists the keys of a config. `python -m benchmarks.command_reference --write` makes
this page from the parsers of the commands.

"""


def page() -> str:
    """Return the page of the current commands."""
    with mock.patch.dict(os.environ, {commands.PREFIX: "./run.sh"}):
        table = commands.command_table()
        rows = [(f"[{name}](#{name})", f"{purpose}") for name, purpose in table.items()]
        parts = [_table(("command", "purpose"), rows), *(part for name in table for part in _section(name)), *_of_run_sh()]
    return HEAD + "\n\n".join(parts) + "\n"


def _section(name: str) -> Iterator[str]:
    """Yield the paragraphs of one command."""
    module = importlib.import_module("jaxtrain.main" if name == "main" else f"jaxtrain.commands.{name}")
    yield f"## {name}"
    yield from _parsed(module.parser())


def _parsed(parser: Parser, child: bool = False) -> Iterator[str]:
    """Yield the paragraphs of a parser and of its subcommands. Those of a subcommand are without the notes of its command."""
    yield _text(parser.purpose[:1].upper() + parser.purpose[1:].removesuffix(".") + ".")
    yield _block("console", commands.to_run_sh(parser.usage_line))
    defaults = {o.usage: o.default for o in parser.options}
    rows = [row for row in parser.rows if row[0] not in parser.commands]
    if rows:
        yield _table(("option", "meaning"), [(f"`{usage}`", _meaning(text, defaults.get(usage))) for usage, text in rows])
    if not child:
        yield from _examples([commands.to_run_sh(line) for line in parser.command_lines])
        yield from map(_text, filter(None, parser.notes.split("\n\n")))
    for subcommand in parser.commands.values():
        yield f"### {subcommand.prog}"
        yield from _parsed(subcommand, child=True)


def _meaning(text: str, default: object) -> str:
    """Return the description of an option, with its default if the description does not have it."""
    said = "default" in text.lower() or str(default) in re.split(r"[()]", text)
    known = default not in (None, "")
    return _text(text) + (f"; default `{default}`" if known and not said else "")


def _text(text: str) -> str:
    """Return plain text as one line of Markdown. Options are code; all other characters are escaped."""
    parts = OPTION.split(" ".join(text.split()))
    escaped = [re.sub(r"([\\*<|`\[\]])", r"\\\1", part) for part in parts]
    escaped[1::2] = [f"`{option}`" for option in parts[1::2]]
    return "".join(escaped)


def _examples(lines: list[str]) -> Iterator[str]:
    if lines:
        yield _block("text", "\n".join(lines))


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """Return a Markdown table of cells that are Markdown. Bars in its first column are escaped."""
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {first.replace('|', '\\|')} | {second} |" for first, second in rows)])


def _of_run_sh() -> Iterator[str]:
    """Yield the paragraphs of run.sh: its --help without the table of commands."""
    before, after = re.findall(r"^  cat <<'TEXT'\n(.*?)^TEXT$", (REPO / "run.sh").read_text(), re.MULTILINE | re.DOTALL)
    yield "## run.sh"
    yield "Tests, notebooks, this site, several nodes, and the variables that run.sh reads:"
    yield _block("console", before.removesuffix("commands:\n") + after.strip())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.command_reference", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/commands.md")
    return out


def main() -> int:
    """Print the page; with --write, write it to docs/commands.md."""
    if parser().parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
