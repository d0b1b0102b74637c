"""Start JAX: with GPUs in the environment of a run, without GPUs with the messages of the CUDA plugin removed.

With the `plan` extra, the CUDA plugin is installed without a driver. JAX then tries the plugin at start and prints a traceback.
The plugin's libraries print that the driver is missing, at start or at the first compile for a GPU that is not present. These
messages are irrelevant, so the platform is set to CPU and the messages are removed from stderr. All other lines are kept.
"""

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxtrain.config.environment import EXPORTED, Overlay, exported_names
from jaxtrain.config.hardware import WITHOUT_GPUS, Devices
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.runtime import interrupt
from jaxtrain.runtime.distributed import Cluster, agree, connect

CONNECT_S = 300  # for all processes of a run to connect
TELL_S = 30  # for a process with problems to connect to the others, and tell them
PLATFORMS = "JAX_PLATFORMS"
THREADS = "PJRT_NPROC"  # XLA's CPU client uses this as the number of cores
NOTES = re.compile(rb"cudart_stub|log messages before absl::InitializeLog|^\[Gloo\] Rank|experimental recoverable task")


def set_environment(overlay: Overlay) -> None:
    """Set the environment variables of a run, including JAX's memory fraction, before JAX initialises its GPU backend.

    Removes those that an earlier run has set. Raises ConfigError if this process has initialised the backend with other values.
    """
    old = exported_names(os.environ) - {PLATFORMS} - overlay.set.keys()
    absent = {name: value for name, value in overlay.set.items() if os.environ.get(name) != value}
    if (old or absent) and _started_on_gpus():
        rule = "JAX was started in this process before, without this, and has allocated its share of GPU memory"
        wanted = " ".join([*(f"{name}={value}" for name, value in absent.items()), *(f"{name} unset" for name in sorted(old))])
        remedy = "Begin a new process in which nothing is computed before the run, or one that is started with these."
        raise ConfigError([Problem("environment", wanted, rule, remedy)])
    for name in old:
        del os.environ[name]
    export(absent)  # what the shell sets alike stays the shell's


def export(values: Mapping[str, str]) -> None:
    """Set environment variables, and record that they are not from the shell."""
    exported_values = {name: os.environ[name] for name in sorted(exported_names(os.environ))}
    os.environ.update(values)
    os.environ[EXPORTED] = json.dumps(exported_values | dict(values))


def choose_cpu() -> None:
    """Make JAX start on the CPU."""
    if os.environ.get(PLATFORMS) != "cpu":  # otherwise the shell has chosen it
        export({PLATFORMS: "cpu"})


def _started_on_gpus() -> bool:
    if "jax" not in sys.modules:
        return False
    import jax
    from jax._src import xla_bridge  # there is no public API to ask

    # `plan` loads plugins to describe machines, before JAX starts devices. A loaded plugin has read the variables.
    return xla_bridge._plugins_registered and jax.devices()[0].platform == "gpu"


def set_compile_cache(folder: str) -> None:
    """Store all compiled programs in `folder` (paths.cache), so that a restart takes seconds. If it is "", store none.

    Programs for several CPU devices are compiled again in each process. XLA:CPU (jaxlib 0.11.2) loaded some of them wrongly:
    all-gathers of independent loops joined the same rendezvous, which corrupted memory and ended the process. The present step
    was loaded correctly 25 times on five layouts, which is too few to trust the cache.
    """
    if not folder:
        return
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def threads_for_cpus(count: int) -> None:
    """Give XLA more threads than its default for `count` CPU devices of one process, before JAX starts them.

    The default follows from the numbers of devices and cores. A collective blocks a thread for each device until all devices
    have joined. If all threads are blocked, the computation that the other devices wait for never runs: after 40 s XLA ends the
    process ("Termination timeout for ... Expected 4 threads to join the rendezvous"). This happened with 8 devices on 2 cores.
    """
    if count > 1:
        current = os.environ.get(THREADS, "")
        least = max(os.cpu_count() or 1, 3 * count)
        os.environ[THREADS] = str(max(least, int(current) if current.isdigit() else 0))


def start_jax(
    devices: Devices,
    cluster: Cluster | None = None,
    check: Callable[[], None] = lambda: None,
    connect_s: int = CONNECT_S,
) -> None:
    """Import jax and start its backend on the devices that `hardware.probe` found, with the other processes of the run.

    Raises ClusterError if the processes do not connect. Raises ConfigError if JAX does not take a variable of the shell, or
    starts fewer GPUs than the driver reports, or no GPU: JAX itself would take the CPU.

    Args:
        devices: those of all processes of the run.
        check: called when the processes of a cluster are connected, and before devices are started. It may raise.
        connect_s: seconds for them to connect.
    """
    if devices.kind == "cpu":
        choose_cpu()
        threads_for_cpus(devices.count)
    else:
        load_nvrtc_builtins()
    for name in [name for name, value in os.environ.items() if name.startswith("JAX_") and not value]:
        del os.environ[name]  # JAX fails on an empty variable, which to the user is one that is not set
    check_flags()
    with quiet() if devices.kind == "cpu" else ending_at_once():
        try:
            import jax
        except ValueError as error:  # of a variable that JAX reads when it is imported
            rule = f"JAX cannot be imported: {error}"
            raise ConfigError([Problem("environment", None, rule, "Correct this variable, or unset it.")]) from error

        if devices.kind == "cpu":
            jax.config.update("jax_platforms", "cpu")  # if jax was imported before, it has read the variable
    if cluster is not None:
        with quiet():
            connect(cluster, init_timeout_s=connect_s)
            check()
    if devices.kind == "cpu":
        with quiet():
            jax.devices()
        return
    with ending_at_once():
        _start_gpus(devices, alone=cluster is None)


def check_flags() -> None:
    """Raise ConfigError if XLA does not take XLA_FLAGS, as if a name is unknown: XLA would end this process."""
    flags = os.environ.get("XLA_FLAGS")
    if not flags or "jax" in sys.modules:
        return
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode and (match := re.search(r"^[EF]\d+ .*?\] (.*)", done.stderr, re.MULTILINE)):
        raise ConfigError([Problem("XLA_FLAGS", flags, match[1].strip(" ."), "Correct it, or unset it.")])


def start_processes(devices: Devices, cluster: Cluster | None, problems: list[Problem]) -> None:
    """Start JAX, with the other processes of the run.

    A process with problems first tells the others, which would wait for it. Raises ConfigError if one process has any, or if
    the processes have different devices.
    """

    def check_agreement() -> None:
        if refused := agree(devices, problems):
            raise ConfigError(refused)

    if not problems:
        start_jax(devices, cluster, check_agreement)
        return
    choose_cpu()  # to import JAX: no device is started
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    try:
        start_jax(devices, cluster, check_agreement, TELL_S)
    except ConfigError:
        raise
    except Exception as error:  # the others cannot be told
        raise ConfigError(problems) from error


def _start_gpus(devices: Devices, alone: bool) -> None:
    """Start JAX on GPUs. Raise ConfigError if it starts fewer. alone: this is the run's only process."""
    import jax

    held_records: list[logging.LogRecord] = []

    def hold_errors(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        held_records.append(record)
        return False

    log, started, reasons = logging.getLogger("jax._src.xla_bridge"), [], []
    log.addFilter(hold_errors)
    try:
        started = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS=cuda; jax 0.11.2 asserts that some platform has started
        if not alone:  # another process may have failed
            raise
        reasons.append(str(error))
    finally:
        log.removeFilter(hold_errors)
    count = sum(device.platform == "gpu" for device in started)
    if devices.problem and not count:  # JAX can use some GPUs that a run does not take, such as a MIG slice
        raise ConfigError([devices.problem])
    if count < devices.count:
        outcome = f"started {count} of them" if count else "could not start CUDA"
        logged = [str(record.exc_info[1]) if record.exc_info else record.getMessage() for record in held_records]
        why = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (*logged, *reasons) if text))
        rule = f"the driver reports {devices.count} x {devices.name}, and JAX {outcome}{': ' if why else ''}{why}".rstrip(".")
        remedy = f"Run ./run.sh preflight to check the node (docs/first_gpu_run.md has the usual causes), or {WITHOUT_GPUS}."
        raise ConfigError([Problem("devices", None, rule, remedy)])
    for record in held_records:  # of another platform
        log.handle(record)


def load_nvrtc_builtins() -> None:
    """Load the builtins of NVRTC from NVIDIA's packages. cuDNN compiles attention with NVRTC.

    The libnvrtc of some packages (nvidia-cuda-nvrtc 13.0.88, which torch 2.11 requires) does not search its own folder, and JAX
    loads only libnvrtc. cuDNN then fails with "No valid execution plans built".
    """
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*/lib/libnvrtc-builtins.so.*")):
            with contextlib.suppress(OSError):  # of another platform, or damaged: cuDNN's message names the cause
                ctypes.CDLL(str(file))


CUDA_FOLDER = "Fix: set CUDA_ROOT to a folder that has bin/ptxas and nvvm/libdevice/libdevice.10.bc"
# Text in an error of XLA or cuDNN -> the part of CUDA that is missing, and a remedy.
CUDA_HINTS = {
    "No valid execution plans built": "Likely cause: NVRTC, which compiles cuDNN's attention, finds no libnvrtc-builtins.so of "
    "its version. Fix: set LD_PRELOAD to the path of that file, or attention.impl=pallas.",
    "No PTX compilation provider is available": f"Cause: there is no ptxas. {CUDA_FOLDER}.",
    "libdevice not found": f"Cause: there is no libdevice.10.bc. {CUDA_FOLDER}.",
}


def cuda_hint(error: str) -> str:
    """Return which part of CUDA is missing, and a remedy, if an error of XLA or cuDNN shows it; else ""."""
    return next((cause for text, cause in CUDA_HINTS.items() if text in error), "")


@contextlib.contextmanager
def ending_at_once(stderr: int = 2) -> Iterator[None]:
    """On Ctrl-C, print one line to descriptor `stderr` and end at once: imports of C libraries lose a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if not interrupt.is_command or not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: interrupt.end_interrupted(number, frame, stderr))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Remove the lines that match NOTES from stderr, from any thread or library. Every other line is passed on at once."""
    if sys.stderr is None:  # closed
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    os.dup2(writing, 2, inheritable=True)
    os.close(writing)

    def pass_on() -> None:
        with open(reading, "rb") as lines:
            for line in lines:
                if not NOTES.search(line):
                    with contextlib.suppress(OSError):  # the terminal is gone; the pipe must still be read
                        os.write(saved, line)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        with ending_at_once(saved):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)  # closes the last end for writing: the thread reads to the end
        thread.join(1.0)
        if not thread.is_alive():  # a child that inherited stderr keeps the pipe open
            os.close(saved)
