"""Train and finetune transformer language models in JAX, on a mesh of NVIDIA GPUs.

    import jaxtrain as jt

    config = jt.load("llama3_8b", mesh={"fsdp": 4, "tensor": 2})    a config of configs/, or a path
    table = jt.shardings(config, "h200:8")      the sharding of every array on a machine without its GPUs
    table["layers.mlp.gate"].draw()             the devices of each shard
    plan = jt.plan(config, "h200:8")            memory, communication and step time of the compiled step
    jt.search("llama3_8b", "h200:8")            the fastest layouts that fit

    result = jt.train("tiny", "runs/tiny")      train or resume; result.metrics, result.checkpoints
    run = jt.open_run("runs/tiny")              run.to_pandas(), run.write_report()
    jt.generate("runs/tiny", "def ")            text from a run, a checkpoint or a Hugging Face folder
    jt.evaluate("runs/tiny", ["x = 1\\n"])      loss and bits per byte of texts
    jt.parity("tiny", "one,fsdp2,tensor2")      whether layouts take the same steps

`help(jaxtrain.commands.api)` describes each function. `python -m jaxtrain` lists the commands.
"""

# Importing jaxtrain touches no device and imports no jax. This file runs on Python 3.8 too, so a start outside the environment
# ends with a message.

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.commands.api import evaluate, generate, load, load_weights, open_run, parity, plan, search, shardings, train

__version__ = "0.1.0"
__all__ = ["evaluate", "generate", "load", "load_weights", "open_run", "parity", "plan", "search", "shardings", "train"]
MODULES = ("plan", "train")  # functions of the API with the name of a folder


def _check_environment() -> None:
    """Raise an error if Python is older than 3.12 or, for a command, if jaxtrain's packages are not installed.

    Raises:
        SystemExit: this process was started as `python -m jaxtrain COMMAND`.
        ImportError: another program imported jaxtrain.
    """
    as_command = sys.argv[:1] == ["-m"]  # Python's own mark while it looks for the module to run.
    if sys.version_info < (3, 12):  # noqa: UP036
        key, rule = "Python = {}.{}.{}".format(*sys.version_info[:3]), "jaxtrain needs 3.12 or later"
    elif as_command and importlib.util.find_spec("ml_collections") is None:
        key, rule = "Python = " + sys.executable, "the packages of jaxtrain are not installed there"
    else:
        return
    problem = key + ": " + rule + ". Fix: ./run.sh COMMAND, which prepares the environment and starts the command in it."
    if as_command:
        print("error: " + problem, file=sys.stderr)
        sys.exit(2)
    raise ImportError(problem)


class _QuietJax:
    """A finder of modules, by which the first import of jax runs in `startup.quiet`, in each process that imports jaxtrain."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of jax, with a loader that removes messages about a missing CUDA driver; None for other modules."""
        spec = PathFinder.find_spec(name) if name == "jax" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module: ModuleType) -> None:
                from jaxtrain.runtime.startup import quiet

                sys.meta_path.remove(cls)
                with quiet():
                    execute(module)

            spec.loader.exec_module = execute_quietly
        return spec


_check_environment()
if "jax" not in sys.modules:
    sys.meta_path.insert(0, _QuietJax)


def _refuse_command_as_module() -> None:
    """End a process that was started as `python -m jaxtrain.COMMAND`. Python would not say which form works, or do nothing."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    name = module.rpartition(".")[2]
    file = os.path.join(os.path.dirname(__file__), "commands", name + ".py")
    if module in ("jaxtrain." + name, "jaxtrain.commands." + name) and name != "supervise" and os.path.isfile(file):
        print("error: " + module + ": is no program. Fix: python -m jaxtrain " + name, file=sys.stderr)
        sys.exit(2)


if sys.argv[:1] == ["-m"]:  # this process was started as `python -m jaxtrain COMMAND`
    _refuse_command_as_module()
    from jaxtrain.runtime import interrupt, streams

    streams.set_up_streams()
    interrupt.handle_interrupts()


class _Callable(ModuleType):
    """The class of a folder with the name of a function of the API: both `jt.plan(...)` and `jaxtrain.plan.make` work."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        function = getattr(importlib.import_module("jaxtrain.commands.api"), self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)


class _Package(ModuleType):
    """The class of this package. The import of a folder sets it as an attribute here, in place of the API's function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in MODULES and isinstance(value, ModuleType):
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Return a function of the Python API, imported when it is first used."""
    if name in MODULES:
        return importlib.import_module("jaxtrain." + name)
    if name in __all__:
        return getattr(importlib.import_module("jaxtrain.commands.api"), name)
    raise AttributeError("module 'jaxtrain' has no attribute " + repr(name))


def __dir__() -> list:
    """Return the names of the Python API."""
    return [*__all__, "__version__"]
