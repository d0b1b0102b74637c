"""Starting JAX on a machine without a GPU, in peace.

With the `plan` extra the CUDA plugin is installed where no driver is. JAX then tries it at start, prints a traceback, and the
plugin's libraries each report the missing driver, then or when the first program is compiled for a described GPU. None of it
matters there, so CPU is named as the platform and those lines are left out. Every other line on stderr comes through.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from jaxtrain.hardware import Devices

NOTES = re.compile(rb"cudart_stub|log messages before absl::InitializeLog")


def start_jax(devices: Devices) -> None:
    """Import jax and start its backend on the devices that `hardware.probe` found."""
    if devices.kind != "cpu":
        import jax

        jax.devices()
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    with quiet():
        import jax

        jax.devices()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves NOTES out of stderr, whoever writes there. All other lines come when the block ends, however it ends."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not NOTES.search(line):
                    os.write(2, line)
