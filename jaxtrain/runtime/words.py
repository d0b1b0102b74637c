"""Format processes and their errors as text, for logs."""

import os
import socket
from collections.abc import Sequence


def this_process() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def listed(processes: Sequence[int]) -> str:
    """Return processes in order as text: "processes 0 to 4, 6 and 7". After 8 parts the rest is a number: "and 40 more"."""
    ranges: list[list[int]] = []
    for i in processes:
        if ranges and i == ranges[-1][-1] + 1:
            ranges[-1].append(i)
        else:
            ranges.append([i])
    parts = [each for r in ranges for each in ([[i] for i in r] if len(r) < 3 else [r])]
    shown = parts if len(parts) <= 8 else parts[:7]
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in shown]
    if len(shown) < len(parts):
        texts.append(f"{len(processes) - sum(map(len, shown))} more")
    if len(processes) == 1:
        return f"process {texts[0]}"
    return f"processes {', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else f"processes {texts[0]}"


def reason(error: OSError) -> str:
    """Return the system's text of an error in lower case, without the "[Errno N]" that Python adds."""
    known = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno or 0) if known else error.strerror or str(error)).lower()


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
