"""What a process that measures has found so far, in a file: one that is ended, or hangs, or crashes keeps what it has."""

import json
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.metrics import write_atomic

# Errors that say nothing of the hardware: others hold the memory, or this JAX has no such operation.
NO_FAULT = re.compile(r"RESOURCE_EXHAUSTED|UNIMPLEMENTED|out of memory", re.IGNORECASE)


class Answer:
    """What was found so far, in a file that is always whole.

    doing, key, began_unix: what it is at; measured: key -> figures; left_out: key -> why there are none; failed: key -> how the
    work on the GPUs failed.
    """

    def __init__(self, path: Path, limit_s: float):
        self._path, self._until = path, time.monotonic() + limit_s
        self.fields: dict[str, Any] = {"doing": "", "key": "", "began_unix": 0.0, "done": False}
        self.fields |= {"measured": {}, "left_out": {}, "failed": {}}

    def doing(self, words: str, key: str = "") -> None:
        """What comes next, for whoever has to say in what this process hung."""
        self.fields |= {"doing": words, "key": key, "began_unix": time.time()}
        self._keep()

    def add(self, key: str, words: str, make: Callable[[], Any], *, together: bool = False) -> None:
        """Measures `key`. What fails is left out, with its reason; so is what begins too late, but not where processes do it
        together: one that left it out would leave the others waiting."""
        if not together and time.monotonic() > self._until:
            self.fields["left_out"][key] = "no time was left"
            return
        self.doing(words, key)
        try:
            self.fields["measured"][key] = make()
        except Exception as error:  # compiler, driver, memory: the rest is worth measuring all the same
            traceback.print_exc()
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            self.fields["left_out"][key] = text
            if not NO_FAULT.search(str(error)):
                self.fields["failed"][key] = f"{words}: {text}"

    def done(self) -> None:
        self.fields |= {"doing": "", "key": "", "done": True}
        self._keep()

    def _keep(self) -> None:
        write_atomic(self._path, json.dumps(self.fields))
