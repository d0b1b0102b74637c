"""Traces of a few steps, and the compiled program's text, in WORKDIR/profile."""

import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import Profile
from jaxtrain.metrics.files import write_atomic

TRACE_NAME = "train"  # what a step is called in the trace
HLO_TEXT = "train_step.hlo.txt"


class Tracer:
    """Traces steps profile.start .. profile.start + profile.steps - 1, and profile.steps steps whenever asked, on process 0.

    Call `before_step(step)` and `after_step(step, result)` around every step, and `close(result)` when the loop ends, also by
    an exception. A run that resumes within these steps traces the rest of them. A run that resumes after them logs that there
    is no trace. `requests` returns the number of requests so far (`signals.Stop.traces`). A request starts a trace of the next
    steps. All requests during a trace start one further trace after it. Python's own calls are left out of the trace, because
    recording them slows the measured loop. The text of `program` is written next to a trace, because a trace does not record a
    program from the compile cache. A trace that cannot be written is removed, and does not end the run. graphs: whether kernels
    are launched in CUDA graphs, so that operations may lack names.
    """

    def __init__(
        self,
        profile: Profile,
        workdir: str | Path,
        say: Callable[[str], None],
        *,
        process_index: int = 0,
        requests: Callable[[], int] = lambda: 0,
        program: "HasText | None" = None,
        graphs: bool = False,
    ):
        self.workdir = Path(workdir)
        self.folder = self.workdir / "profile"
        self._first, self._end, self._steps = profile.start, profile.start + profile.steps, profile.steps
        self._active = process_index == 0
        self._waiting = profile.start > 0 and self._active
        self._requests, self._answered = requests, 0
        self._say, self._program, self._graphs = say, program, graphs
        self._tracing = self._failed = False
        self._annotation: Any = None
        self._session = ""

    def use(self, program: "HasText") -> None:
        """Write the text of this program next to later traces."""
        self._program = program

    @property
    def tracing(self) -> bool:
        """Return whether the current step is being traced (its time is then not representative)."""
        return self._tracing

    def before_step(self, step: int) -> None:
        """Start the trace if it is due, and mark the start of the step."""
        if self._waiting and step >= self._first and not self._tracing:
            self._waiting = False
            if step >= self._end:
                self._say(f"No trace: this run starts at step {step}, behind profile.start={self._first}.")
            else:
                self._start(step)
        if not self._tracing and (requests := self._requests()) > self._answered:
            self._answered = requests
            if not self._active:
                self._say("No trace by this process: process 0 takes it, if it gets the signal.")
            elif not self._steps:
                self._say("No trace: profile.steps = 0. A trace has as many steps as that key says, from the next start on.")
            else:
                self._end = step + self._steps
                self._start(step)
        if self._tracing:
            import jax

            self._annotation = jax.profiler.StepTraceAnnotation(TRACE_NAME, step_num=step)
            self._annotation.__enter__()

    def _start(self, step: int) -> None:
        import jax

        if self._failed:
            self._say("No trace: JAX starts none in this process after one that could not be written.")
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        # By default a trace's name is the second in which it began, which two traces of short steps would share.
        self._session = options.session_id = f"{time.strftime('%Y_%m_%d_%H_%M_%S')}_step_{step}"
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._tracing = True
        self._say(f"Tracing steps {step} to {self._end - 1}.")
        if self._graphs:
            self._say(
                "  This run launches its kernels in CUDA graphs, and the trace may lack the names of operations. A run that "
                "starts with profile.start above 0 is compiled without graphs."
            )

    def after_step(self, step: int, result: Any) -> None:
        """Mark the end of the step. `result`: any result of the step; the last traced step waits for it."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._tracing and step + 1 >= self._end:
            self.close(result)

    def close(self, result: Any = None) -> None:
        """Write a running trace after waiting for `result`; without a trace, do nothing."""
        if not self._tracing:
            return
        import jax

        if self._annotation is not None:  # the step raised
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        self._tracing = False
        try:
            jax.block_until_ready(result)  # the device runs behind the loop: without this the last steps are cut off
        finally:
            written = self._write()
        if self._failed:
            return
        self._say(
            f"Trace: {written[-1] if written else self.folder}\n"
            f"  time of a step: {to_run_sh('python -m jaxtrain profile')} {shlex.quote(str(self.workdir))}   "
            "(or open the .trace.json.gz in its folder at https://ui.perfetto.dev)"
        )

    def _write(self) -> list[Path]:
        """Write the trace, and the program's text beside it. Return all traces of the run, the newest last."""
        import jax

        try:
            jax.profiler.stop_trace()
            written = sorted(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
            if written and self._program is not None and (text := self._program.as_text()) is not None:
                write_atomic(written[-1].with_name(HLO_TEXT), text)
        except (OSError, jax.errors.JaxRuntimeError) as error:
            self._failed = True  # JAX starts no trace after this
            for cut in self.folder.glob(f"plugins/profile/{self._session}"):
                shutil.rmtree(cut, ignore_errors=True)
            self._say(f"No trace: it cannot be written to {self.folder} ({error}). Free some space there.")
            return []
        return written


class HasText(Protocol):
    """The part of jax.stages.Compiled that `dump_hlo` uses."""

    def as_text(self) -> str | None: ...


def dump_hlo(compiled: HasText, workdir: str | Path, say: Callable[[str], None]) -> Path:
    """Write the compiled train step's HLO to WORKDIR/profile/train_step.hlo.txt and return that path."""
    path = Path(workdir) / "profile" / HLO_TEXT
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("profile.dump_hlo = True: this backend gives no text of a compiled program. Set it to False.")
    write_atomic(path, text)
    say(f"HLO: {path} ({len(text.splitlines())} lines; a text editor opens it, the entry computation is under ENTRY)")
    return path
