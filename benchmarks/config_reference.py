"""Writes docs/config.md: every section and key of a config with type, default, values and meaning, from its declarations.

python -m benchmarks.config_reference          print the page
python -m benchmarks.config_reference --write  write docs/config.md
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxtrain.config.declaration import Key
from jaxtrain.config.schema import OWN, RULES, RunConfig, all_keys, format_value, public_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"


def page() -> str:
    """Return the page of the current keys."""
    out = [
        "# Every key of a config",
        "",
        "This page is generated: `python -m benchmarks.config_reference --write`; a test compares.",
        "",
        "A config file is Python: `get_config(arg=None)` starts from `jaxtrain.config.default_config()`, changes what it wants",
        "and returns it. `--config=FILE:variant` hands it `variant`. Any key below can be set on the command line, as",
        "`--config.SECTION.KEY=VALUE`, where the last one wins. No key may be None: '' and 0 stand for not set.",
        "`python -m jaxtrain.main --config=FILE --explain` prints all keys with their values and who set them;",
        "a value that is the default counts as the default's, also if the file sets it.",
        "The file may import modules of its own folder and of the current folder.",
        "",
        "A warm-up or decay keeps its part of the file's run (of the default's, if it is one) in a shorter run, unless it was",
        "typed too; that of a constant schedule changes only if it is too long. `optimizer.lr_min` keeps its part of a lower",
        "`--config.optimizer.lr`. A line of the log says so.",
        "",
        "All mistakes in a config (unknown keys, wrong types, impossible combinations) are reported together, before anything",
        "is started or written, and the exit code is 2.",
        "",
        "There is no dropout, and `precision` takes neither fp16 (it would need loss scaling) nor int8, mxfp8 or nvfp4.",
        "",
    ]
    default = RunConfig()
    top = [f for f in dataclasses.fields(default) if not dataclasses.is_dataclass(f.default) and f.name != OWN]
    out += ["## top level", "", *_table([(f.name, f.default, f.metadata["key"]) for f in top], ""), ""]
    for f in dataclasses.fields(default):
        if not dataclasses.is_dataclass(f.default):
            continue
        section: Any = f.default
        out += [f"## {f.name}", "", type(section).__doc__ or "", ""]
        keys = dataclasses.fields(section)
        entries = [(public_name(k.name), getattr(section, k.name), k.metadata["key"]) for k in keys if k.name != "rules"]
        if f.name == "sharding":
            entries += [(f"rules.{axis}", onto, all_keys()[f"sharding.rules.{axis}"]) for axis, onto in RULES.items()]
        out += [*_table(entries, f"{f.name}."), ""]
    out += [f"## {OWN}", "", "Keys that a config file adds for [parts of your own](extending.md#settings-of-your-own).", ""]
    return "\n".join(out)


def _table(entries: list[tuple[str, Any, Key]], prefix: str) -> list[str]:
    lines = ["| key | type | default | values | meaning |", "|---|---|---|---|---|"]
    for name, default, key in entries:
        values, meaning = (words.replace("|", "\\|") for words in (key.values, key.doc))
        lines.append(f"| `{prefix}{name}` | {type(default).__name__} | `{format_value(default)}` | {values} | {meaning} |")
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.config_reference", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/config.md")
    return out


def main() -> int:
    """Print the page; with --write, write it to docs/config.md."""
    if parser().parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
