"""The Python API. `import jaxtrain as jt` gives these functions, each imported when it is first used.

A config is a RunConfig, the path of a config file, or the name of a file in configs/: "llama3_8b", "llama3_8b:half".
"""

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console

from jaxtrain.config import hardware, launch, own_parts
from jaxtrain.config.schema import ConfigError, Problem, RunConfig, flatten
from jaxtrain.data import loading
from jaxtrain.metrics.samples import Sampling
from jaxtrain.runtime.startup import start_jax

if TYPE_CHECKING:
    import numpy as np

    from jaxtrain.report.plan import PlanReport
    from jaxtrain.report.run_page import OpenRun
    from jaxtrain.report.search_page import Search
    from jaxtrain.report.shardings import Shardings
    from jaxtrain.train.parity_report import ParityResult
    from jaxtrain.train.run import Result

Config = RunConfig | str | os.PathLike[str]


def _with_user_line[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose errors of the user's own family, loss, optimizer or data source end with the user's line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (problem := own_parts.problem_of(error)) and not isinstance(error, own_parts.WrongPart):
                error.add_note(str(problem))
            raise

    return call


def _start_without_gpus() -> None:
    """Start JAX if this process has no GPU. JAX alone would start there without XLA's GPU compiler, which plans need."""
    if (devices := hardware.probe()).kind == "cpu":
        start_jax(devices)


def load(name: Config, **overrides: Any) -> RunConfig:
    """Return a config with keys set as on the command line.

    Args:
        name: a path ("FILE.py", "FILE.py:variant"), or the name of a file in configs/. A RunConfig is returned as it is.
        overrides: dotted keys or sections: `load("llama3_8b", mesh={"fsdp": 4, "tensor": 2}, precision="f32")`.

    A UserWarning tells each value that was changed to fit the overrides, such as a shorter warm-up.

    Raises:
        ConfigError: the config has mistakes. The error lists all of them.
        TypeError: overrides of a RunConfig, whose derived values are final.
    """
    if isinstance(name, RunConfig):
        if overrides:
            raise TypeError("overrides belong to a config file: name the file, or use dataclasses.replace on the RunConfig")
        return name
    loaded = _load_config(name, overrides)
    for note in loaded.launch.notes:
        warnings.warn(note, stacklevel=2)
    return loaded.run


def _load_config(name: str | os.PathLike[str], overrides: Mapping[str, Any]) -> launch.LoadedConfig:
    loaded = loading.load_config(_config_argv(name, overrides))
    if loaded.problems:
        raise ConfigError(launch.fill_commands(loaded.problems, loaded.launch))
    return loaded


@_with_user_line
def shardings(config: Any, topology: str = "", **overrides: Any) -> "Shardings":
    """Return the sharding of every array: of a config's train step on a machine, or of a pytree of arrays.

    Nothing is compiled and no memory is allocated.

    Args:
        config: a config, or a pytree of jax.Array or jax.ShapeDtypeStruct with NamedShardings.
        topology: the machine that a config is sharded for, such as "h200:8" or "h100:8x16"; "": the devices of this process.
        overrides: keys of the config.

    Raises:
        ConfigError: the config has mistakes, or training on this machine would refuse it, or the devices of this process do not
            fit.
        TopologyError: the machine is unknown.
        RuntimeError: XLA's GPU compiler is not installed, or JAX was started before in this process, without it.
    """
    from jaxtrain.report.shardings import run_shardings, tree_shardings

    if not isinstance(config, RunConfig | str | os.PathLike):
        return tree_shardings(config)
    _start_without_gpus()
    import jax

    from jaxtrain.plan import topology as machines

    run = load(config, **overrides)
    if not topology:
        return run_shardings(run, jax.devices())
    machine = machines.parse_topology(topology)
    _check_machine(run, machine)
    return run_shardings(run, machine)


@_with_user_line
def plan(config: Config, topology: str, **overrides: Any) -> "PlanReport":
    """Return memory, communication and step time of a config's train step, compiled for a machine without its GPUs.

    Takes from seconds to minutes. A notebook shows the result as tables; `plan(...).to_pandas("collectives")` is a DataFrame.

    Raises:
        ConfigError, TopologyError, RuntimeError: as `shardings`.
    """
    _start_without_gpus()
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.make import make_plan
    from jaxtrain.report.plan import plan_report

    run, machine = load(config, **overrides), machines.parse_topology(topology)
    _check_machine(run, machine)
    name = "" if isinstance(config, RunConfig) else _config_label(os.fspath(config))
    return plan_report(make_plan(run, machine, name=name, overrides=tuple(f"{k}={v}" for k, v in flatten(overrides))))


@_with_user_line
def search(config: Config, topology: str, budget: float = 600.0, most: int = 0, **overrides: Any) -> "Search":
    """Return the fastest layout of a config that fits on a machine, and the others that were compiled.

    Args:
        budget: seconds after which the search and its running compiles are ended; 0: no limit.
        most: largest number of plans; 0: 8.

    Raises:
        ConfigError, TopologyError, RuntimeError: as `shardings`.
    """
    _start_without_gpus()
    from jaxtrain.plan import FOLDER, MOST
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.search import search as run_search
    from jaxtrain.plan.search_cache import PlanCache
    from jaxtrain.report.search_page import search_report

    if not budget >= 0 or most < 0:
        raise ValueError(f"budget = {budget}, most = {most}: must not be negative. Fix: 0 for no limit, and for 8 plans.")
    run, machine = load(config, **overrides), machines.parse_topology(topology)
    name = "" if isinstance(config, RunConfig) else _config_label(os.fspath(config))
    override_args = tuple(f"{k}={v}" for k, v in flatten(overrides))
    options = {"budget_s": budget, "most": most or MOST, "cache": PlanCache(FOLDER)}
    return search_report(run_search(run, name, machine, overrides=override_args, **options))


@_with_user_line
def train(config: Config | Mapping[str, Any], workdir: str | os.PathLike[str], **overrides: Any) -> "Result":
    """Train in this process, as `python -m jaxtrain.main` does, and return how the run ended.

    If the folder has a run, that run is resumed.

    Args:
        config: a config, or the ConfigDict or nested dict of its keys.
        overrides: keys of the config, for a path or the name of a file in configs/.

    Raises:
        ConfigError: the config has mistakes; nothing was written.
        TypeError: overrides of a RunConfig, ConfigDict or dict.
        Exception: the error that ended the run, such as train.divergence.Diverged. The run's receipt records the error.
    """
    from jaxtrain.train.run import run

    if isinstance(config, str | os.PathLike):
        loaded = _load_config(config, overrides)
        try:
            return run(loaded.run, workdir, loaded.launch.notes)
        except ConfigError as error:
            raise ConfigError(launch.fill_commands(error.problems, loaded.launch)) from error.__cause__
    if isinstance(config, RunConfig):
        return run(load(config, **overrides), workdir)
    if overrides:
        raise TypeError("overrides belong to a config file: set the keys in the dict")
    return run(config, workdir)


def open_run(folder: str | os.PathLike[str]) -> "OpenRun":
    """Return a run: its files (config, receipt, metrics, goodput, samples), and in a notebook its page. Nothing is written.

    `open_run("runs/tiny").to_pandas()` has a row for each logged step; `.write_report()` makes the HTML report.

    Raises:
        RunError: the folder has no run.
    """
    from jaxtrain.report.run import read_run
    from jaxtrain.report.run_page import OpenRun

    return read_run(os.fspath(folder), kind=OpenRun)


@_with_user_line
def evaluate(
    model: str | os.PathLike[str], texts: Sequence[str], base: str = "", tokenizer: str = "", *, ema: bool = False
) -> dict[str, float]:
    """Return how well a model predicts texts: "loss" (nats per token), "bits_per_byte", "tokens".

    Each text is a separate document. Control tokens in it are encoded as characters, and a UserWarning says so. Texts longer
    than the model's sequences are divided. Each token is scored once, but the first token of a text is not scored if the
    tokenizer has no start token: its bytes do not count either.

    Args:
        model: a run's folder, a checkpoint, or a Hugging Face folder.
        base: for a run with adapters, the folder of the base model if it was moved.
        tokenizer: the tokenizer, as data.tokenizer; "": the model's own.
        ema: use the average of the weights (train.ema_decay).

    Raises:
        CheckpointError, HuggingFaceError: the weights cannot be read.
        ConfigError: there is no average of the weights.
        TokenizerError: the tokenizer cannot be read.
        ValueError: there is no text with a token to predict.
    """
    import math

    _start_without_gpus()
    import jax

    from jaxtrain.data import text_format
    from jaxtrain.hf.importing import open_origin
    from jaxtrain.train.generation import load_model
    from jaxtrain.train.scoring import Scorer

    source = open_origin(os.fspath(model))
    # A missing tokenizer is an error before the weights are read.
    loaded_tokenizer, _ = text_format.load_with_tokenizer(source.text(), tokenizer or source.run().data.tokenizer)
    run, sampler, params, _, _ = load_model(os.fspath(model), jax.local_devices(), base, ema)
    scorer = Scorer(run, sampler, params)
    windows, scored_bytes = [], 0
    for text in texts:
        if note := text_format.note_control_tokens(text, loaded_tokenizer, "a text"):
            warnings.warn(note, stacklevel=2)
        ids = [*loaded_tokenizer.bos, *loaded_tokenizer.encode(text)]
        if len(ids) > 1:  # the first token of a document without a start token is not predicted
            windows += scorer.windows(ids[1:], ids[0])
            first_bytes = 0 if loaded_tokenizer.bos else loaded_tokenizer.first_bytes(text, ids[0])
            scored_bytes += len(text.encode()) - first_bytes
    tokens = sum(window.count for window in windows)
    if not tokens:
        raise ValueError("texts: no token to predict. Fix: give at least one text of two tokens or more.")
    nats = -math.fsum(log_prob for log_prob, _ in scorer.score(windows))
    return {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / scored_bytes, "tokens": float(tokens)}


@_with_user_line
def generate(
    model: str | os.PathLike[str],
    prompt: str = "",
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    base: str = "",
    chat_template: str = "",
    tokenizer: str = "",
    ema: bool = False,
) -> str:
    """Return a prompt and its continuation by a model; or, for `messages`, the answer alone.

    The text ends where the model ends it: before an end of text, or the end of a turn.

    Args:
        model: a run's folder, a checkpoint, or a Hugging Face folder.
        prompt: text to continue. Control tokens in it are encoded as characters, and a UserWarning says so.
        messages: a conversation to answer, as [{"role": "user", "content": "Hello"}], written by the model's chat template.
        temperature: sampling temperature; 0: always the most likely token.
        top_p: sample from the smallest set of most likely tokens whose probabilities add up to this.
        base: for a run with adapters, the folder of the base model if it was moved.
        chat_template: for messages, a name such as "chatml" or a file; "": the model's own.
        tokenizer: the tokenizer, as data.tokenizer; "": the model's own.
        ema: use the average of the weights (train.ema_decay).

    Raises:
        CheckpointError, HuggingFaceError: the weights cannot be read.
        ConfigError: there is no average of the weights.
        TokenizerError: the tokenizer cannot be read, or there is no chat template.
        ValueError: prompt and messages are both given, or the chat template cannot write the messages.
    """
    _start_without_gpus()
    import jax

    from jaxtrain.data import text_format
    from jaxtrain.data.rows import parse_question
    from jaxtrain.hf.importing import open_origin
    from jaxtrain.train.generation import Chat, continue_text, load_model

    if messages is not None and prompt:
        raise ValueError("generate takes a prompt or messages, and both are given. Fix: leave one out.")
    if chat_template and messages is None:
        raise ValueError("chat_template writes messages, and there are none. Fix: messages=[{'role': 'user', 'content': ...}].")
    conversation = None
    if messages is not None:
        conversation, answer = parse_question({"messages": messages if isinstance(messages, str) else list(messages)})
        if answer:
            raise ValueError("messages end with an answer, and ask nothing. Fix: end with a message of the user.")
    source = open_origin(os.fspath(model))
    spec = tokenizer or source.run().data.tokenizer
    chat = None if conversation is None else Chat(source.text(), spec, chat_template)
    # A missing tokenizer is an error before the weights are read.
    loaded_tokenizer, text = text_format.load_with_tokenizer(source.text(), spec)
    loaded = load_model(os.fspath(model), jax.local_devices(), base, ema)
    sampling = Sampling(prompt, max_tokens, temperature, top_p, seed)
    if conversation is not None and chat is not None:
        return chat.answer(loaded, conversation, sampling)
    if note := text_format.note_control_tokens(prompt, loaded_tokenizer):
        warnings.warn(note, stacklevel=2)
    return continue_text(loaded.sampler, loaded.params, loaded_tokenizer, sampling, stops=text.stops)


@_with_user_line
def load_weights(
    model: str | os.PathLike[str], *, dtype: str = "", base: str = "", ema: bool = False
) -> "dict[str, np.ndarray]":
    """Return the weights of a model as arrays on the host, by jaxtrain's names. Host memory must have room for all of them.

    The names are those of checkpoints. Each layer has its own arrays, counted from 0 in its stack, whatever the mesh, the
    stages or the stacking of the run: `embed.embedding` and `head` (V, D), `layers.0.attention.wq` and `wo` (D, N, H), `wk` and
    `wv` (D, K, H), `layers.0.mlp.gate`, `up` and `down` (D, F), or with experts (E, D, F), `final_norm.scale` (D,), for
    vocabulary V, width D, N heads, K key/value heads of width H, feed-forward width F and E experts. A model with
    model.tied_head has no `head`. Adapters (`lora.rank`) are merged into the weights of their base.

    A model of your own needs its module, on PYTHONPATH, for adapters alone: without them, nothing is built.

    Args:
        model: a run's folder (its newest step, or the best one with checkpoint.keep_best), a checkpoint such as
            `runs/tiny/checkpoints/500`, or a Hugging Face folder, also of `hf export --raw`.
        dtype: dtype of all arrays, f32 or bf16 (ml_dtypes.bfloat16); "": each as it is stored, for adapters in their base.
        base: for a run with adapters, the folder of the base model if it was moved.
        ema: the average of the weights (train.ema_decay), in float32.

    Raises:
        CheckpointError, HuggingFaceError: the weights cannot be read.
        ConfigError: there is no average of the weights.
        ValueError: another dtype.
    """
    _start_without_gpus()
    import numpy as np

    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.names import PREFIX
    from jaxtrain.hf.weights import open_weights
    from jaxtrain.kernels.numerics import DTYPES

    if dtype not in ("", "f32", "bf16"):
        raise ValueError(f"dtype = {dtype!r}: must be f32, bf16, or '' for that of the stored arrays. Fix: dtype='f32'.")
    source = open_origin(os.fspath(model)).choose(ema)
    source.announce()
    stored, read = open_weights(source, base, dtype == "f32")
    wanted = {name: DTYPES[dtype] if dtype else a.dtype for name, a in stored.items()}
    return {name.removeprefix(PREFIX): np.array(x, wanted[name]) for name, x in read(list(wanted))}


@_with_user_line
def parity(config: str | os.PathLike[str], meshes: str = "", steps: int = 3, **overrides: Any) -> "ParityResult":
    """Train the same few steps on several layouts, and compare losses, gradients and weights with the first layout.

    Args:
        config: a path or a name, as in `load`. A small model is enough: agreement does not depend on its size.
        meshes: names of layouts, such as "one,fsdp2,tensor2"; "": the default layouts of `python -m jaxtrain parity`.
        overrides: keys of the config.

    Raises:
        ConfigError: the config has mistakes, or a layout needs more devices than this process has.
        ValueError: the first layout could not be run.
    """
    _start_without_gpus()
    import jax

    from jaxtrain.train import parity_layouts
    from jaxtrain.train.parity_runs import compare_layouts

    run = load(config, **overrides)
    meshes = meshes or parity_layouts.default_layouts(run.train, run.model)
    layouts, problems = parity_layouts.parse_layouts(meshes)
    needed, available = max((layout.devices for layout in layouts), default=1), jax.device_count()
    if needed > available:
        remedy = f"Set JAX_NUM_CPU_DEVICES={needed} before JAX starts."
        problems = [Problem("meshes", meshes, f"needs {needed} devices, and this process has {available}", remedy)]
    if steps < 1:
        problems.append(Problem("steps", steps, "must be at least 1", "Set 3."))
    argv = _config_argv(config, overrides)
    runs, _, layout_problems = parity_layouts.load_layouts([] if problems else layouts, argv)
    if problems := problems + layout_problems:
        raise ConfigError(launch.fill_commands(problems, loading.load_config(argv).launch))
    override_args = tuple(f"{key}={value}" for key, value in flatten(overrides))
    return compare_layouts(runs, steps, rich.console.Console(quiet=True), os.fspath(config), override_args)


def _config_argv(name: str | os.PathLike[str], overrides: Mapping[str, Any]) -> list[str]:
    return [f"--config={_config_path(os.fspath(name))}", *(f"--config.{key}={value}" for key, value in flatten(overrides))]


def _config_path(name: str) -> str:
    """Return the path of a config; a name without folder and suffix is a file of configs/."""
    stem, colon, variant = name.partition(":")
    path = launch.REPO / "configs" / f"{stem}.py"
    in_configs = not (Path(stem).exists() or Path(name).is_file()) and "/" not in stem and path.exists()
    return f"{path}{colon}{variant}" if in_configs else name


def _config_label(name: str) -> str:
    """Return the path of a config relative to the repository, as on a command line there."""
    return _config_path(name).removeprefix(f"{launch.REPO}/")


def _check_machine(run: RunConfig, topology: Any) -> None:
    """Raise ConfigError if training on this machine would refuse the config."""
    from jaxtrain.plan.fit import training_check

    if problems := training_check(topology)(run):
        raise ConfigError(list(problems))


__all__ = ["evaluate", "generate", "load", "load_weights", "open_run", "parity", "plan", "search", "shardings", "train"]
