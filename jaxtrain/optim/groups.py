"""Parameter groups: parse `optimizer.groups`, and find the settings of a parameter by its name.

    PATTERN:SETTING=VALUE[,SETTING=VALUE...][;PATTERN:...]        embed.*:lr=0.1;*.scale:weight_decay=0

A pattern is as in a shell (fnmatch) and must match the whole name of a parameter. Names have no layer number:
layers.attention.wq. A parameter belongs to the first group whose pattern matches its name.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

from jaxtrain.config.declaration import Key
from jaxtrain.config.schema import Optimizer, Problem, choices, nearest

KEY = "optimizer.groups"
METHODS = choices("optimizer.name")
SETTINGS = ("lr", "weight_decay", "optimizer")
NUMBER = Key("the range of lr and weight_decay", at_least=0)


@dataclasses.dataclass(frozen=True)
class Group:
    """The settings of one parameter group."""

    pattern: str
    lr: float = 1.0  # factor of the schedule's learning rate
    weight_decay: float | None = None  # None: optimizer.weight_decay on matrices, 0 otherwise
    optimizer: str = ""  # adamw | muon; "": by the kind of the parameter


def parse(text: str) -> tuple[tuple[Group, ...], list[Problem]]:
    """Parse `optimizer.groups`. Return (groups, problems of the syntax and of single settings)."""
    groups: list[Group] = []
    problems: list[Problem] = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        pattern, given, settings = (part.strip() for part in item.partition(":"))
        if not (pattern and given and settings):
            problems.append(Problem(KEY, item, "must be PATTERN:SETTING=VALUE", f"For example {pattern or '*.scale'}:lr=0.5."))
            continue
        if any(g.pattern == pattern for g in groups):
            problems.append(Problem(KEY, item, f"{pattern!r} has a group already", "Write its settings into one group."))
        chosen: dict[str, float | str] = {}
        for setting in settings.split(","):
            problem = _read(setting, chosen)
            if problem:
                problems.append(Problem(KEY, item, *problem))
        groups.append(Group(pattern, **chosen))  # pyright: ignore[reportArgumentType]
    return tuple(groups), problems


def _read(setting: str, chosen: dict[str, float | str]) -> tuple[str, str] | None:
    """Add one SETTING=VALUE to `chosen`. Return (problem, remedy); None if the setting is valid."""
    name, given, value = (part.strip() for part in setting.partition("="))
    if not (given and name and value):
        return f"{setting.strip()!r} must be SETTING=VALUE", f"Settings are {', '.join(SETTINGS)}."
    if name not in SETTINGS:
        return f"no setting {name!r}", nearest(name, list(SETTINGS))
    if name in chosen:
        return f"{name!r} is set twice", "Keep one of them."
    if name == "optimizer":
        if value not in METHODS:
            return f"optimizer = {value!r}: no such choice", nearest(value, list(METHODS))
        chosen[name] = value
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number >= 0:
        return f"{name} = {value!r} must be a number of at least 0", "lr is a factor of the schedule's, weight_decay a value."
    if wrong := NUMBER.out_of_range(number):
        return f"{name} = {value!r} {wrong[0]}", f"Write {name}={1 if name == 'lr' else Optimizer().weight_decay:g}."
    chosen[name] = number
    return None


def group_of(groups: Sequence[Group], name: str) -> Group | None:
    """Return the first group whose pattern matches a parameter's name; None if no pattern matches."""
    return next((g for g in groups if fnmatch.fnmatchcase(name, g.pattern)), None)


def moved(text: str) -> list[tuple[str, str]]:
    """Return (pattern, optimizer) of each group that sets `optimizer`, and so changes the tensors of the optimizer state."""
    return [(g.pattern, g.optimizer) for g in parse(text)[0] if g.optimizer]


def problems(text: str, optimizer: str) -> list[Problem]:
    """Return the problems of `optimizer.groups` that do not depend on the model. optimizer: the value of optimizer.name."""
    groups, found = parse(text)
    if groups and optimizer not in METHODS:
        rule = f"{optimizer} makes its own updates, and would ignore them"
        return [*found, Problem(KEY, text, rule, f"Set '', or optimizer.name to {' or '.join(METHODS)}.")]
    if optimizer == "adamw" and any(g.optimizer == "muon" for g in groups):
        rule = "optimizer=muon in a group needs optimizer.name = muon"
        found.append(Problem(KEY, text, rule, "Set optimizer.name to muon, and optimizer=adamw for the other parameters."))
    return found


def too_fast(optimizer: Optimizer) -> list[Problem]:
    """Return the problems of learning rates and weight decays that make weights grow in every step, until they are NaN."""
    o, found = optimizer, []
    if o.name in METHODS and o.lr * o.weight_decay > 1:
        rule = f"times optimizer.lr = {o.lr:g} is {o.lr * o.weight_decay:g}, and a step must not subtract more than the weight"
        found.append(Problem("optimizer.weight_decay", o.weight_decay, rule, f"Set {_below(1 / o.lr)} or less."))
    for g in parse(o.groups)[0]:
        lr = o.lr * g.lr
        if lr > 1:
            rule = f"lr of {g.pattern!r} times optimizer.lr = {o.lr:g} is {lr:g}, and a learning rate must be at most 1"
            found.append(Problem(KEY, o.groups, rule, f"Write {g.pattern}:lr={_below(1 / o.lr)} or less."))
        elif lr * (decay := o.weight_decay if g.weight_decay is None else g.weight_decay) > 1:
            rule = f"a step would subtract {lr * decay:g} times the weight from weights of {g.pattern!r}, and 1 is the most"
            found.append(Problem(KEY, o.groups, rule, f"Write {g.pattern}:weight_decay={_below(1 / lr)} or less."))
    return found


def _below(value: float) -> str:
    """Return a number in three digits that is at most `value`."""
    digits = 10 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / digits) * digits:.3g}"


def unfit(text: str, matrices: Mapping[str, bool]) -> list[Problem]:
    """Return the problems of `optimizer.groups` that depend on the model.

    A group has a problem if no parameter belongs to it, or if it sets optimizer=muon for a parameter that is no matrix.

    matrices: name of each parameter -> whether Muon supports the parameter.
    """
    groups, found = parse(text)[0], []
    names = list(matrices)
    for g in groups:
        fit = [name for name in names if fnmatch.fnmatchcase(name, g.pattern)]
        mine = [name for name in fit if group_of(groups, name) is g]
        if not fit and any(part.isdigit() for part in g.pattern.split(".")):
            rule = f"{g.pattern!r} names a layer by number, and the layers of a stack are one parameter"
            found.append(Problem(KEY, text, rule, "Leave the number out, which means every layer."))
        elif not fit:
            found.append(Problem(KEY, text, f"{g.pattern!r} matches no parameter", f"There are {', '.join(names)}."))
        elif not mine:
            rule = f"all parameters that {g.pattern!r} matches belong to earlier groups: {', '.join(fit)}"
            found.append(Problem(KEY, text, rule, "Put the narrower pattern first."))
        not_one = [name for name in mine if not matrices[name]]
        if g.optimizer == "muon" and not_one:
            rule = f"{', '.join(not_one)} is no matrix, and Muon needs matrices"
            found.append(Problem(KEY, text, rule, "Name matrices, or leave optimizer out."))
    return found
