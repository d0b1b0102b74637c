"""From a command line to a RunConfig: reads the config file, applies the overrides, and collects everything that is wrong.

Every command that takes `--config` comes through `load`. It does by hand what absl's flags would do, because those stop at
the first mistake, drop arguments without dashes in silence, and read `None` for a string as the text 'None'. The config
object is ml_collections' all the same, so files written for it work.
"""

import dataclasses
import math
import re
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from jaxtrain.config import ConfigError, Problem, RunConfig, default_config, flatten, nearest, resolve, to_dict

REPO = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = REPO / "configs" / "tiny.py"  # wherever the command is given

NO_DROPOUT = (
    "jaxtrain has no dropout: pretraining sees its data about once, where dropout only slows learning, and its random masks "
    "would have to be drawn again at every recomputation and layout"
)


# The text of an override given as a bare --config.KEY, which switches a bool on and is a mistake for all else.
BARE = "\0"


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a run was asked for, as its receipt and log tell it."""

    config_file: str
    variant: str
    overrides: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """The config's name, with its variant: llama3_8b-half."""
        stem = Path(self.config_file).stem
        return re.sub(r"[^\w.-]+", "-", f"{stem}-{self.variant}") if self.variant else stem


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `load` found. `run` holds defaults where a problem stands; `file_read` is False where it is nothing but defaults."""

    run: RunConfig
    problems: list[Problem]
    origins: dict[str, str]
    launch: Launch
    options: dict[str, str]
    file_read: bool


def load(argv: Sequence[str], options: Mapping[str, str] | None = None, switches: Mapping[str, str] | None = None) -> Loaded:
    """Reads `--config=FILE[:variant] [--config.KEY=VALUE ...]` and the command's own options. No jax, no device.

    `argv` is without the program's name. `options` are names of the command's own options with their defaults; `switches`
    likewise, and a switch given without a value takes the value in `switches` (absent, it is ""). All of them come back in
    `Loaded.options`. Nothing is raised for a wrong command line: every mistake is a Problem.

    `Loaded.origins` says for each dotted key who set it: default, file, command line, or derived (by `config.resolve`).
    """
    options, switches = dict(options or {}), dict(switches or {})
    given, overrides, problems = _split(argv, options, switches)
    path, variant = _file_and_variant(given.pop("config", _relative(DEFAULT_CONFIG)))
    launch = Launch(path, variant, tuple((k, "true" if text == BARE else text) for k, text in overrides), tuple(argv))
    config, wrong = read_file(path, variant or None)
    problems += wrong
    file_read = config is not None
    config = config if config is not None else default_config()
    from_file = dict(flatten(config))
    chosen: set[str] = set()
    for key, text in overrides:
        wrong = apply(config, key, text)
        problems += wrong
        if not wrong:
            chosen.add(key)
    run, wrong = resolved(config)
    problems += wrong
    origins = _origins(run, dict(flatten(config)), from_file, chosen)
    return Loaded(run, problems, origins, launch, options | dict.fromkeys(switches, "") | given, file_read)


def resolved(config: ml_collections.ConfigDict | Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """`config.resolve`, with the reasons for what does not exist on purpose."""
    run, problems = resolve(config)
    return run, [_explain_refusal(p) for p in problems]


def _split(
    argv: Sequence[str], options: Mapping[str, str], switches: Mapping[str, str]
) -> tuple[dict[str, str], list[tuple[str, str]], list[Problem]]:
    """(options given, overrides in order, problems) of a command line."""
    given: dict[str, str] = {}
    overrides: list[tuple[str, str]] = []
    problems: list[Problem] = []
    names = ["config", *options, *switches]
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            remedy = f"Write --{arg}." if re.match(r"config\.[\w.]+=", arg) else "Options start with --; see --help."
            problems.append(Problem(f"argument {arg!r}", None, "left over: it belongs to no option", remedy))
            continue
        name, has_value, value = arg[2:].partition("=")
        if name.startswith("config."):
            key = name.removeprefix("config.")
            if not has_value and rest and not rest[0].startswith("--") and not rest[0].startswith("config."):
                value, has_value = rest.pop(0), "="
            overrides.append((key, value if has_value else BARE))
        elif name in switches and not has_value:
            given[name] = switches[name]
        elif name not in names:
            known = [f"--{n}" for n in [*names, "config.KEY", "help"]]
            problems.append(Problem(f"--{name}", None, "no such option", nearest(f"--{name}", known)))
        elif has_value:
            given[name] = value
        elif rest and not rest[0].startswith("--"):
            given[name] = rest.pop(0)
        else:
            problems.append(Problem(f"--{name}", None, "needs a value", f"Write --{name}=VALUE."))
    return given, overrides, problems


def _file_and_variant(text: str) -> tuple[str, str]:
    """FILE.py:variant -> (FILE.py, variant). The first colon after .py counts, so that a folder may hold one."""
    path, found, variant = text.partition(".py:")
    return (path + ".py", variant) if found else (text, "")


def _relative(path: Path) -> str:
    """As short as it can be written from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def read_file(path: str, variant: str | None) -> tuple[ml_collections.ConfigDict | None, list[Problem]]:
    """The ConfigDict of a config file's `get_config(variant)`; None with the reasons where there is none.

    The file is executed without being imported, so that no __pycache__ appears beside it.
    """
    file = Path(path)
    if not file.is_file():
        known = [_relative(p) for folder in (REPO / "configs", file.parent) for p in sorted(folder.resolve().glob("*.py"))]
        stems = {Path(p).stem: p for p in known}
        remedy = f"Did you mean {stems[file.stem]}?" if file.stem in stems else nearest(path, list(stems.values()))
        return None, [Problem("--config", path, "no such file", remedy)]
    module = types.ModuleType("jaxtrain_config_file")
    module.__file__ = str(file)
    try:
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        if not hasattr(module, "get_config"):
            return None, [
                Problem("--config", path, "defines no get_config", "Define get_config(arg=None) as configs/tiny.py does.")
            ]
        config = module.get_config(variant) if variant else module.get_config()
    except ConfigError as e:
        return None, e.problems
    # A config file is a user's program: whatever it raises is a mistake in that file, to be shown with its line.
    except Exception as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(file)]
        line = e.lineno if isinstance(e, SyntaxError) else (lines[-1] if lines else None)
        where = f"line {line} raises" if line else "raises"
        first = (str(e).strip() or "no message").splitlines()[0].rstrip(".")
        remedy = "Mend the file."
        if isinstance(e, TypeError) and variant and "argument" in first:
            remedy = f"This file takes no variant: leave out ':{variant}'."
        return None, [Problem("--config", path, f"{where} {type(e).__name__}: {first}", remedy)]
    if not isinstance(config, ml_collections.ConfigDict):
        rule = f"get_config returned {type(config).__name__}, not a ConfigDict"
        return None, [Problem("--config", path, rule, "Start from jaxtrain.config.default_config() and return it.")]
    return config, []


def apply(config: ml_collections.ConfigDict, key: str, text: str) -> list[Problem]:
    """Sets one dotted key from its text, read as the type the key has. The config is unchanged where that fails."""
    known = [name for name, _ in flatten(config)]
    shown = None if text == BARE else text
    *path, last = key.split(".")
    section: Any = config
    for name in path:
        section = section[name] if isinstance(section, ml_collections.ConfigDict) and name in section else None
    if not isinstance(section, ml_collections.ConfigDict) or last not in section:
        return [_explain_refusal(Problem(key, shown, "no such key", nearest_key(key, known)))]
    old = section[last]
    if isinstance(old, ml_collections.ConfigDict):
        keys = [k for k in known if k.startswith(f"{key}.")]
        return [Problem(key, shown, "is a section", f"Set its keys, as --config.{keys[0] if keys else key + '.KEY'}=VALUE.")]
    if old is None:
        # A file that wrote None; `resolve` reports it, and there is no type to read the text by.
        return []
    if text == BARE and not isinstance(old, bool):
        return [Problem(key, None, "needs a value", f"Write --config.{key}=VALUE.")]
    try:
        section[last] = True if text == BARE else parse(text, type(old))
    except (ValueError, KeyError):
        return [Problem(key, text, f"must be {type(old).__name__}", f"Write {_example(text, type(old))}.")]
    return []


def _example(text: str, kind: type) -> str:
    if kind is int and re.fullmatch(r"[\d.]+e\+?\d{1,2}", text.lower()) and float(text).is_integer():
        return str(int(float(text)))
    return {int: "a whole number such as 8", float: "a number such as 3e-4", bool: "true or false"}[kind]


def parse(text: str, kind: type) -> Any:
    """A value from its text. Raises ValueError or KeyError where the text is none of `kind`."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    return kind(text)


def nearest_key(key: str, known: list[str]) -> str:
    """Remedy for a misspelt dotted key: the same name in another section, else the nearest key, else what there is."""
    last = key.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == last]
    if same:
        return f"Did you mean {same[0]}?"
    section = key.partition(".")[0] + "."
    siblings = [k for k in known if k.startswith(section)]
    remedy = nearest(key, siblings or known)
    return remedy if siblings or remedy.startswith("Did") else "--explain lists all keys."


def _explain_refusal(problem: Problem) -> Problem:
    """Keys that people look for and that do not exist on purpose."""
    if problem.rule == "no such key" and "dropout" in problem.key:
        return Problem(problem.key, problem.value, NO_DROPOUT, "Remove it; optimizer.weight_decay is the regulariser.")
    return problem


def _origins(run: RunConfig, asked: Mapping[str, Any], from_file: Mapping[str, Any], chosen: set[str]) -> dict[str, str]:
    defaults = dict(flatten(default_config()))
    origins = {}
    for key, value in flatten(to_dict(run)):
        if key in chosen:
            origins[key] = "command line"
        elif from_file.get(key, defaults.get(key)) != defaults.get(key):
            origins[key] = "file"
        else:
            origins[key] = "default"
        if key in asked and asked[key] != value:
            origins[key] = "derived"
    return origins


def report(problems: Sequence[Problem]) -> int:
    """Writes all problems to stderr, one a line, and returns the exit code for a wrong command or config."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"{count}; nothing was started and nothing written:", file=sys.stderr)
    for problem in dict.fromkeys(str(p) for p in problems):
        print(f"  {problem}", file=sys.stderr)
    return 2
