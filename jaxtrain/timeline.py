"""What a start is made of: seconds from the birth of the process to the first step, part by part. No jax here."""

import os
import time
from pathlib import Path


def age_s() -> float:
    """Seconds since this process was started; 0.0 on systems that do not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except OSError:
        return 0.0


class Timeline:
    """Parts of a start. Made when the program has been imported and its devices are there: that was `launch`."""

    def __init__(self):
        self.parts: dict[str, float] = {"launch": age_s()}  # seconds
        self._since = time.perf_counter()

    def end(self, part: str) -> None:
        """What was done since the last call is called this."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._since
        self._since = now

    @property
    def words(self) -> str:
        """All of it, in order."""
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.parts.items())
        return f"first step {sum(self.parts.values()):.1f} s after the process began: {parts}"
