"""Format processes and their errors as text, for logs."""

import os
import socket
from collections.abc import Sequence


def this_process() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def listed(processes: Sequence[int]) -> str:
    """Return processes as text, shortened if there are more than 8: "processes 1 and 2", "processes 1, ..., 7 and 40 more"."""
    shown = [str(i) for i in (processes if len(processes) <= 8 else processes[:7])]
    if len(shown) < len(processes):
        shown.append(f"{len(processes) - len(shown)} more")
    return f"process {shown[0]}" if len(shown) == 1 else f"processes {', '.join(shown[:-1])} and {shown[-1]}"


def reason(error: OSError) -> str:
    """Return the system's text of an error in lower case, without the "[Errno N]" that Python adds."""
    known = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno or 0) if known else error.strerror or str(error)).lower()


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
