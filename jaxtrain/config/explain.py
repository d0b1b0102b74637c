"""--explain: all keys of a config, with values, origins and meanings."""

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.declaration import Key
from jaxtrain.config.launch import LoadedConfig, shell_prefix
from jaxtrain.config.schema import OWN, all_keys, format_value

# Section -> the meaning of its keys without a declaration.
UNDECLARED = {OWN: Key("a setting of your own parts"), "sharding": Key("a rule of this config's own")}


def explain_rows(loaded: LoadedConfig, derived: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (key, value, origin, meaning) of every key. A value that was derived reads "requested -> derived"."""
    keys = all_keys()
    out = []
    for key, value in loaded.run.flat.items():
        requested, now = loaded.requested.get(key, value), derived.get(key, value)
        shown = format_value(now) if requested == now else f"{format_value(requested)} -> {format_value(now)}"
        meaning = _meaning(keys.get(key) or UNDECLARED[key.partition(".")[0]])
        out.append((key, shown, loaded.origins.get(key, "default"), meaning))
    return out


def _meaning(key: Key) -> str:
    return f"{key.doc} [{key.values}]" if key.values else key.doc


def print_config(loaded: LoadedConfig, derived: Mapping[str, Any]) -> None:
    """Print the table: by rich on a terminal, otherwise in aligned columns.

    Args:
        loaded: the config, and the origin of each value.
        derived: dotted key -> the derived value, for keys such as mesh.fsdp = -1.
    """
    title = f"{loaded.launch.config_file}{':' + loaded.launch.variant if loaded.launch.variant else ''}"
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("key", "value", "set by", "meaning"):
            table.add_column(column, overflow="fold")
        for row in explain_rows(loaded, derived):
            table.add_row(*map(escape, row), style="bold" if row[2] in ("file", "command line") else "")
        Console().print(table, *(escape(f"\n{note}") for note in loaded.launch.notes), sep="")
        return
    lines = explain_rows(loaded, derived)
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    padded = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]) for line in lines]
    # All lines are one write, so that `--explain | head` does not close the pipe between two writes.
    print("\n".join([title, *padded, *loaded.launch.notes]), flush=True)


def unchecked_note(loaded: LoadedConfig, on_gpus: bool) -> str:
    """Return a line with the facts that --explain has not checked, and the command that plans the memory of this config."""
    machine = [] if on_gpus else [f"--topology={loaded.launch.machine}"]
    plan = f"{shell_prefix()}{to_run_sh('python -m jaxtrain plan')} {shlex.join([*loaded.launch.config_argv, *machine])}"
    return f"not checked: memory of the devices ({plan} does), free disk space, contents of data and weights, logins"
