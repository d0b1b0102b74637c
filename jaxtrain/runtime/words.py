"""Format processes and their errors as text, for logs."""

import os
import socket
from collections.abc import Sequence


def this_process() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def process_list(processes: Sequence[int]) -> str:
    """Return processes, in order, as text: "process 1", "processes 1 and 2", "processes 0 to 4, 6 and 7"."""
    ends = [i for i in processes if not {i - 1, i + 1} <= {*processes}]
    texts = [f"{i} to" if i + 2 in processes and i + 1 in processes else str(i) for i in ends]
    text = ", ".join(texts).replace(" to, ", " to ")
    return f"process {text}" if len(processes) == 1 else f"processes {' and '.join(text.rsplit(', ', 1))}"


def error_text(error: OSError) -> str:
    """Return the system's text of an error in lower case, without the "[Errno N]" that Python adds."""
    has_errno = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno or 0) if has_errno else error.strerror or str(error)).lower()


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
