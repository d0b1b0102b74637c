"""All keys of a config on one page: as text with values and origins, or as the markdown of docs/config.md."""

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config.commands import spelled
from jaxtrain.config.launch import Loaded, variables
from jaxtrain.config.schema import OWN, RULES, Key, RunConfig, declared, flatten, public_name, spelled_value, to_dict

# Section -> the meaning of its keys without a declaration.
OTHERS = {OWN: Key("a setting of your own parts"), "sharding": Key("a rule of this config's own")}


def rows(loaded: Loaded, found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (key, value, origin, meaning) of every key. A value that was derived reads "asked -> derived"."""
    keys = declared()
    out = []
    for key, value in flatten(to_dict(loaded.run)):
        asked, now = loaded.asked.get(key, value), found.get(key, value)
        shown = spelled_value(now) if asked == now else f"{spelled_value(asked)} -> {spelled_value(now)}"
        meaning = _meaning(keys.get(key) or OTHERS[key.partition(".")[0]])
        out.append((key, shown, loaded.origins.get(key, "default"), meaning))
    return out


def _meaning(key: Key) -> str:
    return f"{key.doc} [{key.values}]" if key.values else key.doc


def text(loaded: Loaded, found: Mapping[str, Any]) -> None:
    """Print the table: by rich on a terminal, otherwise in aligned columns.

    Args:
        loaded: the config, and the origin of each value.
        found: dotted key -> the derived value, for keys such as mesh.fsdp = -1.
    """
    title = f"{loaded.launch.config_file}{':' + loaded.launch.variant if loaded.launch.variant else ''}"
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("key", "value", "set by", "meaning"):
            table.add_column(column, overflow="fold")
        for row in rows(loaded, found):
            table.add_row(*map(escape, row), style="bold" if row[2] in ("file", "command line") else "")
        Console().print(table, *(escape(f"\n{note}") for note in loaded.launch.notes), sep="")
        return
    lines = rows(loaded, found)
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    padded = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]) for line in lines]
    # All lines are one write, so that `--explain | head` does not close the pipe between two writes.
    print("\n".join([title, *padded, *loaded.launch.notes]), flush=True)


def not_checked(loaded: Loaded, on_gpus: bool) -> str:
    """Return a line with the facts that --explain has not checked, and the command that plans the memory of this config."""
    machine = [] if on_gpus else [f"--topology={loaded.launch.machine}"]
    plan = f"{variables()}{spelled('python -m jaxtrain plan')} {shlex.join([*loaded.launch.config_argv, *machine])}"
    return f"not checked: memory of the devices ({plan} does), free disk space, contents of data and weights, logins"


def markdown() -> str:
    """Return docs/config.md: every section and key with type, default, values and meaning, from config.py."""
    out = [
        "# Every key of a config",
        "",
        "This page is generated: `python -m jaxtrain.main --explain=markdown > docs/config.md`; a test compares.",
        "",
        "A config file is Python: `get_config(arg=None)` starts from `jaxtrain.config.default_config()`, changes what it wants",
        "and returns it. `--config=FILE:variant` hands it `variant`. Any key below can be set on the command line, as",
        "`--config.SECTION.KEY=VALUE`, where the last one wins. No key may be None: '' and 0 stand for not set.",
        "`python -m jaxtrain.main --config=FILE --explain` prints all keys with their values and who set them.",
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
            entries += [(f"rules.{axis}", onto, declared()[f"sharding.rules.{axis}"]) for axis, onto in RULES.items()]
        out += [*_table(entries, f"{f.name}."), ""]
    out += [f"## {OWN}", "", "Keys that a config file adds for [parts of your own](extending.md#settings-of-your-own).", ""]
    return "\n".join(out)


def _table(entries: list[tuple[str, Any, Key]], prefix: str) -> list[str]:
    lines = ["| key | type | default | values | meaning |", "|---|---|---|---|---|"]
    for name, default, key in entries:
        values, meaning = (words.replace("|", "\\|") for words in (key.values, key.doc))
        lines.append(f"| `{prefix}{name}` | {type(default).__name__} | `{spelled_value(default)}` | {values} | {meaning} |")
    return lines
