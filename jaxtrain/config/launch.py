"""A command line with `--config`: reads the config file, applies the overrides, and collects all problems.

Every command that takes `--config` loads it by jaxtrain/data/loading.py, which reads it here. absl's flags are not used: they
stop at the first mistake, drop arguments without dashes silently, and read `None` for a string as the text 'None'. Config files
have the format of ml_collections' config_flags: `get_config` returns a ConfigDict.
"""

import dataclasses
import difflib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from jaxtrain.config import config_file
from jaxtrain.config.commands import CONFIG, PREFIX
from jaxtrain.config.environment import exported_names
from jaxtrain.config.schema import (
    DERIVED,
    NO_KEY,
    OWN,
    ConfigError,
    Problem,
    RunConfig,
    all_keys,
    default_config,
    flatten,
    resolve,
)
from jaxtrain.config.synonyms import did_you_mean, nearest_key

REPO = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = REPO / "configs" / "tiny.py"  # wherever the command is given

NO_DROPOUT = (
    "jaxtrain has no dropout: pretraining sees its data about once, where dropout only slows learning, and its random masks "
    "would have to be drawn again at every recomputation and layout"
)


# The text of an override given as a bare --config.KEY, which switches a bool on and is a mistake for other types.
BARE = "\0"
NO_OPTION = "no such option"
# Variables of the shell without which the same command has other devices, or does not find the user's own modules.
DECIDING = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PYTHONPATH")


@dataclasses.dataclass(frozen=True)
class Launch:
    """The command line and config of a run, for its receipt and log."""

    config_file: str
    variant: str
    overrides: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()  # one line for each value of the file that was changed to fit the command line
    gpus: int = 0  # number of GPUs that the file's mesh and remat are for: gpus=N of the variant, or the file's GPUS; 0: any

    @property
    def name(self) -> str:
        """Return the config's name, with its variant: llama3_8b-half."""
        stem = Path(self.config_file).stem
        return re.sub(r"[^\w.-]+", "-", f"{stem}-{self.variant}") if self.variant else stem

    @property
    def config_argv(self) -> list[str]:
        """Return config file and overrides as arguments of any command."""
        file = f"{self.config_file}:{self.variant}" if self.variant else self.config_file
        return [f"--config={file}", *(f"--config.{key}={value}" for key, value in self.overrides)]

    @property
    def machine(self) -> str:
        """Return the machine to plan this config for, as --topology takes it."""
        return f"h200:8x{-(-self.gpus // 8)}" if self.gpus > 8 else f"h200:{self.gpus or 8}"

    def size_note(self, gpus: int) -> str:
        """Return a line that names the valid variant for `gpus` GPUs; "" if the config is for that number or for any."""
        if self.gpus in (0, gpus):
            return ""
        variant_items = [item for item in self.variant.split(",") if item and not item.startswith("gpus=")]
        variant = ",".join([*variant_items, f"gpus={gpus}"])
        mismatch = f"{self.config_file} has the mesh, batch and remat for gpus={self.gpus}, and there are {gpus:,}."
        _, _, problems = read_config_file(self.config_file, variant)
        return mismatch if problems else f"{mismatch} For those: --config={self.config_file}:{variant}"


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """The config of a command line.

    Attributes:
        run: the config. Keys with problems have their defaults.
        origins: dotted key -> default, file, command line, or derived.
        requested: dotted key -> the value of file and command line, before derivation.
        file: the config of the file without the overrides; the defaults if it could not be read.
        file_read: whether the config file could be read.
    """

    run: RunConfig
    problems: list[Problem]
    origins: dict[str, str]
    requested: dict[str, Any]
    file: RunConfig
    launch: Launch
    file_read: bool


@dataclasses.dataclass(frozen=True)
class Line:
    """The config's part of a command line: the text of --config or None, overrides in order, other words, and problems."""

    argv: tuple[str, ...]
    file: str | None
    overrides: tuple[tuple[str, str], ...]
    words: list[str]
    problems: list[Problem]


def split_command_line(argv: Sequence[str]) -> Line:
    """Return the parts of a command line: --config and --config.KEY, each with or without "=", and the other words."""
    file, overrides, words, problems = None, [], [], []
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        name, has_value, value = word.partition("=")
        if name != "--config" and not name.startswith("--config."):
            words.append(word)
            continue
        option_prefixes = "--" if name == "--config" else ("--", "config.")
        if not has_value and remaining and not remaining[0].startswith(option_prefixes):
            value, has_value = remaining.pop(0), "="
        if name != "--config":
            overrides.append((name.removeprefix("--config."), value if has_value else BARE))
        elif has_value:
            file = value
        else:
            problems.append(Problem("--config", None, "needs a value", "Write --config=FILE."))
    return Line(tuple(argv), file, tuple(overrides), words, problems)


def read_config(line: Line) -> LoadedConfig:
    """Return the config of a command line, without the steps of its epochs. Uses no jax and no device; nothing is raised."""
    path, variant = _file_and_variant(_relative(DEFAULT_CONFIG) if line.file is None else line.file)
    config, gpus, problems = read_config_file(path, variant or None)
    file_read = config is not None
    config = config if config is not None else default_config()
    file, origins = resolve_config(config)[0], origins_of(config)
    for key, text in line.overrides:
        new_problems = apply_override(config, key, text)
        problems += new_problems
        origins |= {} if new_problems else {key: "command line"}
    run, new_problems = resolve_config(config)
    overrides = tuple((key, "true" if text == BARE else text) for key, text in line.overrides)
    launch = Launch(path, variant, overrides, line.argv, gpus=gpus)
    return LoadedConfig(
        run, [*line.problems, *problems, *new_problems], origins, dict(flatten(config)), file, launch, file_read
    )


def origins_of(config: ml_collections.ConfigDict | Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> "file" if its value is not the default, else "default"."""
    defaults = dict(flatten(default_config()))
    changed = (key for key, value in flatten(config) if key not in defaults or value != defaults[key])
    return dict.fromkeys(all_keys(), "default") | dict.fromkeys(changed, "file")


def resolve_config(config: ml_collections.ConfigDict | Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """Return the result of `config.resolve`. A problem of an unknown dropout key has the reason why jaxtrain has no dropout."""
    run, problems = resolve(config)
    try:
        run.sample.prompt.encode()
    except UnicodeEncodeError:
        fix = "Type it in a terminal of UTF-8, or write it in a config file."
        problems.append(Problem("sample.prompt", run.sample.prompt, "is not UTF-8", fix))
    return run, [explain_refusal(p) for p in problems]


def _file_and_variant(text: str) -> tuple[str, str]:
    """Return (FILE.py, variant) of FILE.py:variant: the first split that names a file, else the first; the whole text first."""
    ends = [match.start() + len(".py") for match in re.finditer(r"\.py:", text)]
    splits = [(text, ""), *((text[:end], text[end + 1 :]) for end in ends)]
    expanded = ((os.path.expanduser(path), variant) for path, variant in splits)
    return next((each for each in expanded if os.path.isfile(each[0])), splits[1] if ends else splits[0])


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if it is inside that folder, else the path unchanged."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def read_config_file(path: str, variant: str | None) -> tuple[ml_collections.ConfigDict | None, int, list[Problem]]:
    """Return (ConfigDict of a config file, number of GPUs of its layout or 0 for any, []); or (None, 0, problems)."""
    file = Path(path)
    if not file.is_file():
        folders = dict.fromkeys((REPO / "configs", file.parent.resolve()))
        config_files = [_relative(p) for folder in folders for p in sorted(folder.glob("*.py"))]
        stems = {Path(p).stem: p for p in config_files}
        close = [file.stem] if file.stem in stems else difflib.get_close_matches(file.stem, stems, 1)
        remedy = f"Did you mean {stems[close[0]]}?" if close else f"Known: {', '.join(config_files)}."
        rule = "is empty" if not path else "is a folder" if file.is_dir() else "no such file"
        if path and file.exists() and not file.is_dir():
            rule, remedy = "is a pipe, and a restart reads the config again", "Write it to a file, and name that."
        return None, 0, [Problem("--config", path, rule, remedy)]
    try:
        with config_file.sibling_imports(file):
            module = config_file.run_config_file(file)
            if not callable(getattr(module, "get_config", None)):
                fix = "Define get_config(arg=None) as configs/tiny.py does."
                return None, 0, [Problem("--config", path, "defines no function get_config", fix)]
            config = module.get_config(variant) if variant else module.get_config()
    except ConfigError as error:
        return None, 0, error.problems
    # A config file is a user's program: every exception is a mistake in that file, shown with its line.
    except (Exception, SystemExit) as error:
        location = config_file.error_location(error, file)
        first = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        remedy = "Correct the file."
        if isinstance(error, TypeError) and not location:  # of the call of get_config
            takes = f"This file takes no variant: leave out ':{variant}'." if variant else f"Name one: --config={path}:VARIANT."
            remedy = takes if "argument" in first else remedy
        elif isinstance(error, SyntaxError) and "'utf-8' codec" in first:
            remedy = "Save it as UTF-8, or name its encoding in its first line: # coding: latin-1"
        elif isinstance(error, ModuleNotFoundError):
            remedy = "Put the module beside the file, or its folder on PYTHONPATH."
        rule = f"{location} raises {type(error).__name__}: {first}".strip()
        return None, 0, [Problem("--config", path, rule, remedy)]
    if not isinstance(config, ml_collections.ConfigDict):
        rule = f"get_config returned {type(config).__name__}, not a ConfigDict"
        return None, 0, [Problem("--config", path, rule, "Start from jaxtrain.config.default_config() and return it.")]
    match = re.search(r"(?:^|,)gpus=([\d_]+)", variant or "")
    gpus = getattr(module, "GPUS", 0)
    if not isinstance(gpus, int):  # the file uses this name for another constant
        return config, 0, []
    return config, int(match[1]) if gpus and match else gpus, []


def apply_override(config: ml_collections.ConfigDict, key: str, text: str) -> list[Problem]:
    """Set one dotted key from its text, read as the key's type. On failure the config is unchanged."""
    known_keys = [name for name, _ in flatten(config)]
    shown = None if text == BARE else text
    *path, last = key.split(".")
    section: Any = config
    for name in path:
        section = section[name] if isinstance(section, ml_collections.ConfigDict) and name in section else None
    if not isinstance(section, ml_collections.ConfigDict) or last not in section:
        remedy = nearest_key(key, known_keys)
        if path == ["sharding", "rules"]:
            remedy = DERIVED.get(last, remedy)
        if path == [OWN]:
            near = difflib.get_close_matches(last, [*(section or {})], 1)
            remedy = f"Set it in the config file first, which decides its type: config.{key} = VALUE."
            remedy = did_you_mean([f"{OWN}.{near[0]}"]) if near else remedy
        return [explain_refusal(Problem(key, shown, NO_KEY, remedy))]
    old = section[last]
    if isinstance(old, ml_collections.ConfigDict):
        keys = [k for k in known_keys if k.startswith(f"{key}.")]
        return [Problem(key, shown, "is a section", f"Set its keys, as --config.{keys[0] if keys else key + '.KEY'}=VALUE.")]
    if old is None:
        # The file set the key to None, so the text has no type. `resolve` reports the None.
        return []
    if text == BARE and not isinstance(old, bool):
        return [Problem(key, None, "needs a value", f"Write --config.{key}=VALUE.")]
    try:
        section[last] = True if text == BARE else parse_value(text, type(old))
    except (ValueError, KeyError):
        kind, example = KIND.get(type(old), (type(old).__name__, ""))
        exact = type(old) is int and re.fullmatch(r"[\d.]+e\+?\d{1,2}", text.lower()) and float(text).is_integer()
        return [Problem(key, text, f"must be {kind}", f"Write {int(float(text)) if exact else kind + example}.")]
    return []


# Type -> (the rule for a text of that type, an example).
KIND = {int: ("a whole number", " such as 8"), float: ("a number", " such as 3e-4"), bool: ("true or false", "")}


def parse_value(text: str, kind: type) -> Any:
    """Return a value from its text. Raises ValueError or KeyError if the text is not of type `kind`, or not finite."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    return kind(text)


def explain_refusal(problem: Problem) -> Problem:
    """Return the problem. If it is of an unknown dropout key or option, its rule is why jaxtrain has no dropout."""
    if problem.rule in (NO_KEY, NO_OPTION) and "dropout" in problem.key:
        return Problem(problem.key, problem.value, NO_DROPOUT, "Remove it; optimizer.weight_decay is the regulariser.")
    return problem


def add_own_hints(problems: list[Problem], run: RunConfig) -> list[Problem]:
    """Return the problems. Those of unknown keys beside a user's own family, loss, optimizer or source name the section own."""
    part_names = {"model": run.model.family, "loss": run.loss.name, "optimizer": run.optimizer.name, "data": run.data.source}
    custom_sections = [section for section, name in part_names.items() if ":" in name]

    def add_hint(problem: Problem) -> Problem:
        section, _, name = problem.key.rpartition(".")
        if problem.rule != NO_KEY or section not in custom_sections:
            return problem
        return dataclasses.replace(
            problem, remedy=f"{problem.remedy} A setting of {part_names[section]} is config.{OWN}.{name} in the config file."
        )

    return [add_hint(p) for p in problems]


def shell_prefix() -> str:
    """Return the variables of the shell that decide what a command does, to type before it: "JAX_NUM_CPU_DEVICES=8 ", or "".

    Variables that the program set are left out, and so is the folder in PYTHONPATH that run.sh adds itself.
    """
    values = {name: os.environ.get(name, "") for name in DECIDING if name not in exported_names(os.environ)}
    if os.environ.get(PREFIX):
        path = values.get("PYTHONPATH", "").split(os.pathsep)
        values["PYTHONPATH"] = os.pathsep.join(folder for folder in path if folder and Path(folder).resolve() != REPO)
    return "".join(f"{name}={shlex.quote(value)} " for name, value in values.items() if value)


def fill_commands(problems: Sequence[Problem], launch: Launch) -> list[Problem]:
    """Return problems whose remedies name commands with this command line's config and overrides in the place of CONFIG.

    The shell's variables are typed before them. A machine behind them becomes the one that the config is for. Overrides with
    a problem of their own are left out.
    """
    problem_keys = {problem.key for problem in problems}
    valid_overrides = [(key, value) for key, value in launch.overrides if key not in problem_keys]
    config_args = shlex.join(dataclasses.replace(launch, overrides=tuple(valid_overrides)).config_argv)
    command = re.compile(rf"(python -m jaxtrain[\w .-]+){CONFIG}( --topology=[\w:]+)?")

    def expand_command(match: re.Match[str]) -> str:
        return f"{shell_prefix()}{match[1]}{config_args}{f' --topology={launch.machine}' if match[2] else ''}"

    return [dataclasses.replace(p, remedy=command.sub(expand_command, p.remedy)) for p in problems]


def report_problems(problems: Sequence[Problem], launch: Launch | None = None) -> int:
    """Write all problems to stderr, one a line, and return the exit code for a wrong command or config.

    launch: the command line, which commands in the remedies repeat (`fill_commands`); None: it has no config.
    """
    problems = fill_commands(problems, launch) if launch else problems
    lines = [*dict.fromkeys(f"error: {problem}" for problem in problems)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    print(*lines, f"{count}; nothing was started and nothing written", sep="\n", file=sys.stderr)
    return 2
