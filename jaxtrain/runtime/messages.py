"""Messages of the supervisor on stderr, and the exception that ends it."""

import contextlib
import os


class End(Exception):
    """Raised to end the supervisor: it prints the reason and exits with `code`."""

    def __init__(self, code: int, reason: str = ""):
        super().__init__(reason)
        self.code = code


class Refusal(End):
    """Raised before anything is started, for a mistake in the command or in an environment variable."""

    def __init__(self, key: str, value: str | None, rule: str, fix: str):
        shown = "" if value is None else f" = {value}"
        super().__init__(2, f"{key}{shown}: {rule}. Fix: {fix}.")


def say(text: str) -> None:
    """Write one line to stderr. An error is ignored: a closed terminal must not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"run.sh: {text}\n".encode(errors="backslashreplace"))
