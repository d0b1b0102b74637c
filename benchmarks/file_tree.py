"""Writes docs/modules.md: every module with the first sentence of its docstring.

python -m benchmarks.file_tree          print the page
python -m benchmarks.file_tree --write  write docs/modules.md
"""

import argparse
import ast
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "modules.md"
FOLDERS = ("configs", "jaxtrain", "benchmarks")
COLUMN = 30  # column at which descriptions begin
LONGEST = 110  # characters; a longer sentence is cut at its colon or semicolon
HEAD = """# Modules

Each module with the first sentence of its docstring. `python -m benchmarks.file_tree --write` makes this page.
[architecture.md](architecture.md) follows one run and one train step through them. Imports point downwards:
`tests/unit/test_imports.py` has the order of folders.

"""


def purpose(path: Path) -> str:
    """Return the first sentence of a module's docstring, without references to papers.

    If the sentence has more than LONGEST characters, return its part before the first colon or semicolon.

    Raises:
      ValueError: the module has no docstring.
    """
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path}: no docstring. Fix: begin the file with one sentence about it.")
    paragraph = " ".join(text.split("\n\n")[0].split())
    paragraph = re.sub(r" \([^()]*(arXiv|\d{4})[^()]*\)", "", paragraph)
    sentence = re.split(r"(?<=[a-z\d)`\"'])\. (?=[A-Z`])", paragraph)[0].removesuffix(".")
    return sentence if len(sentence) <= LONGEST else re.split(r"[:;] ", sentence)[0]


def rows(folder: Path, level: int) -> list[str]:
    """Return a line for a folder and for each of its modules and subfolders, modules first."""
    own = folder / "__init__.py"
    lines = [_row(folder.name + "/", purpose(own) if own.exists() else "", level)]
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        if path.suffix == ".py" and path != own:
            lines.append(_row(path.name, purpose(path), level + 1))
        elif path.is_dir() and list(path.glob("*.py")):
            lines += rows(path, level + 1)
    return lines


def _row(name: str, text: str, level: int) -> str:
    return f"{'  ' * level + name:<{COLUMN}}{text}".rstrip()


def page() -> str:
    """Return the page of the current files."""
    return HEAD + "".join("```text\n" + "\n".join(rows(REPO / name, 0)) + "\n```\n\n" for name in FOLDERS).removesuffix("\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.file_tree", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/modules.md")
    return out


def main() -> int:
    """Print the page; with --write, write it to docs/modules.md."""
    if parser().parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
