"""Where the time of a step goes: traces of a few steps, and the compiled program's text, in WORKDIR/profile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config import Profile
from jaxtrain.metrics import write_atomic

TRACE_NAME = "train"  # what a step is called in the trace


class Tracer:
    """Traces the steps profile.start .. profile.start + profile.steps - 1, once, on process 0.

    Call `before_step(step)` and `after_step(step, result)` around every step, and `close(result)` when the loop ends however
    it ends. A run that starts inside these steps traces the rest of them; one that starts behind them says so. Python's own
    calls are left out of the trace: recording them slows the loop that is to be measured.
    """

    def __init__(self, profile: Profile, workdir: str | Path, say: Callable[[str], None], *, process_index: int = 0):
        self.folder = Path(workdir) / "profile"
        self._first, self._end = profile.start, profile.start + profile.steps
        self._waiting = profile.start > 0 and profile.steps > 0 and process_index == 0
        self._say = say
        self._tracing = False
        self._annotation: Any = None

    @property
    def tracing(self) -> bool:
        """Whether the step under way is being traced (its time is then not representative)."""
        return self._tracing

    def before_step(self, step: int) -> None:
        """Start the trace if it is time, and mark where the step begins."""
        if not self._waiting and not self._tracing:
            return
        import jax

        if self._waiting and step >= self._first:
            self._waiting = False
            if step >= self._end:
                self._say(f"No trace: this run starts at step {step}, behind profile.start={self._first}.")
                return
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._tracing = True
            self._say(f"Tracing steps {step} to {self._end - 1}.")
        if self._tracing:
            self._annotation = jax.profiler.StepTraceAnnotation(TRACE_NAME, step_num=step)
            self._annotation.__enter__()

    def after_step(self, step: int, result: Any) -> None:
        """Mark where the step ends. `result`: anything the step computes; the last traced step is waited for through it."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._tracing and step + 1 >= self._end:
            self.close(result)

    def close(self, result: Any = None) -> None:
        """Write a trace still running, after waiting for `result`; without one nothing happens."""
        if not self._tracing:
            return
        import jax

        if self._annotation is not None:  # the step raised
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        self._tracing = False
        try:
            jax.block_until_ready(result)  # the device works behind the loop: without this the last steps are cut off
        finally:
            jax.profiler.stop_trace()
        written = sorted(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        self._say(
            f"Trace: {written[-1] if written else self.folder}\n"
            f"  open it: pip install xprof && xprof --logdir {self.folder}   (or drop the .trace.json.gz beside it on "
            "https://ui.perfetto.dev)"
        )


class HasText(Protocol):
    """A jax.stages.Compiled, as far as `dump_hlo` looks at it."""

    def as_text(self) -> str | None: ...


def dump_hlo(compiled: HasText, workdir: str | Path, say: Callable[[str], None]) -> Path:
    """Write the compiled train step's HLO to WORKDIR/profile/train_step.hlo.txt and return that path."""
    path = Path(workdir) / "profile" / "train_step.hlo.txt"
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("profile.dump_hlo = True: this backend gives no text of a compiled program. Set it to False.")
    write_atomic(path, text)
    say(f"HLO: {path} ({len(text.splitlines())} lines; a text editor opens it, the entry computation stands under ENTRY)")
    return path
