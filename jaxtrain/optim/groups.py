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
from jaxtrain.config.schema import Optimizer, Problem, choices, suggest

KEY = "optimizer.groups"
METHODS = choices("optimizer.name")
SETTINGS = ("lr", "weight_decay", "optimizer")
VALUE_RANGE = Key("the range of lr and weight_decay", at_least=0)


@dataclasses.dataclass(frozen=True)
class Group:
    """The settings of one parameter group."""

    pattern: str
    lr: float = 1.0  # factor of the schedule's learning rate
    weight_decay: float | None = None  # None: optimizer.weight_decay on matrices, 0 otherwise
    optimizer: str = ""  # adamw | muon; "": by the kind of the parameter


def parse_groups(text: str) -> tuple[tuple[Group, ...], list[Problem]]:
    """Parse `optimizer.groups`. Return (groups, problems of the syntax and of single settings)."""
    groups: list[Group] = []
    problems: list[Problem] = []
    for item in filter(None, (field.strip() for field in text.split(";"))):
        pattern, colon, settings = (field.strip() for field in item.partition(":"))
        if not (pattern and colon and settings):
            problems.append(Problem(KEY, item, "must be PATTERN:SETTING=VALUE", f"For example {pattern or '*.scale'}:lr=0.5."))
            continue
        if any(g.pattern == pattern for g in groups):
            problems.append(Problem(KEY, item, f"{pattern!r} has a group already", "Write its settings into one group."))
        values: dict[str, float | str] = {}
        for setting in settings.split(","):
            problem = _add_setting(setting, values)
            if problem:
                problems.append(Problem(KEY, item, *problem))
        groups.append(Group(pattern, **values))  # pyright: ignore[reportArgumentType]
    return tuple(groups), problems


def _add_setting(setting: str, values: dict[str, float | str]) -> tuple[str, str] | None:
    """Add one SETTING=VALUE to `values`. Return (problem, remedy); None if the setting is valid."""
    name, equals, value = (field.strip() for field in setting.partition("="))
    if not (equals and name and value):
        return f"{setting.strip()!r} must be SETTING=VALUE", f"Settings are {', '.join(SETTINGS)}."
    if name not in SETTINGS:
        return f"no setting {name!r}", suggest(name, list(SETTINGS))
    if name in values:
        return f"{name!r} is set twice", "Keep one of them."
    if name == "optimizer":
        if value not in METHODS:
            return f"optimizer = {value!r}: no such choice", suggest(value, list(METHODS))
        values[name] = value
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number >= 0:
        return f"{name} = {value!r} must be a number of at least 0", "lr is a factor of the schedule's, weight_decay a value."
    if problem := VALUE_RANGE.out_of_range(number):
        return f"{name} = {value!r} {problem[0]}", f"Write {name}={1 if name == 'lr' else Optimizer().weight_decay:g}."
    values[name] = number
    return None


def find_group(groups: Sequence[Group], name: str) -> Group | None:
    """Return the first group whose pattern matches a parameter's name; None if no pattern matches."""
    return next((g for g in groups if fnmatch.fnmatchcase(name, g.pattern)), None)


def optimizer_overrides(text: str) -> list[tuple[str, str]]:
    """Return (pattern, optimizer) of each group that sets `optimizer`, and so changes the tensors of the optimizer state."""
    return [(g.pattern, g.optimizer) for g in parse_groups(text)[0] if g.optimizer]


def find_group_problems(text: str, optimizer: str) -> list[Problem]:
    """Return the problems of `optimizer.groups` that do not depend on the model. optimizer: the value of optimizer.name."""
    groups, problems = parse_groups(text)
    if groups and optimizer not in METHODS:
        rule = f"{optimizer} makes its own updates, and would ignore them"
        return [*problems, Problem(KEY, text, rule, f"Set '', or optimizer.name to {' or '.join(METHODS)}.")]
    if optimizer == "adamw" and any(g.optimizer == "muon" for g in groups):
        rule = "optimizer=muon in a group needs optimizer.name = muon"
        problems.append(Problem(KEY, text, rule, "Set optimizer.name to muon, and optimizer=adamw for the other parameters."))
    return problems


def find_rate_problems(optimizer: Optimizer) -> list[Problem]:
    """Return the problems of learning rates and weight decays that make weights grow in every step, until they are NaN."""
    opt, problems = optimizer, []
    if opt.name in METHODS and opt.lr * opt.weight_decay > 1:
        rule = (
            f"times optimizer.lr = {opt.lr:g} is {opt.lr * opt.weight_decay:g}, "
            "and a step must not subtract more than the weight"
        )
        problems.append(Problem("optimizer.weight_decay", opt.weight_decay, rule, f"Set {_round_down(1 / opt.lr)} or less."))
    for group in parse_groups(opt.groups)[0]:
        lr = opt.lr * group.lr
        if lr > 1:
            rule = f"lr of {group.pattern!r} times optimizer.lr = {opt.lr:g} is {lr:g}, and a learning rate must be at most 1"
            problems.append(Problem(KEY, opt.groups, rule, f"Write {group.pattern}:lr={_round_down(1 / opt.lr)} or less."))
        elif lr * (decay := opt.weight_decay if group.weight_decay is None else group.weight_decay) > 1:
            rule = f"a step would subtract {lr * decay:g} times the weight from weights of {group.pattern!r}, and 1 is the most"
            problems.append(
                Problem(KEY, opt.groups, rule, f"Write {group.pattern}:weight_decay={_round_down(1 / lr)} or less.")
            )
    return problems


def _round_down(value: float) -> str:
    """Return a number in three digits that is at most `value`."""
    digits = 10 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / digits) * digits:.3g}"


def find_model_problems(text: str, matrices: Mapping[str, bool]) -> list[Problem]:
    """Return the problems of `optimizer.groups` that depend on the model.

    A group has a problem if no parameter belongs to it, or if it sets optimizer=muon for a parameter that is no matrix.

    matrices: name of each parameter -> whether Muon supports the parameter.
    """
    groups, problems = parse_groups(text)[0], []
    names = list(matrices)
    for group in groups:
        matching = [name for name in names if fnmatch.fnmatchcase(name, group.pattern)]
        members = [name for name in matching if find_group(groups, name) is group]
        if not matching and any(component.isdigit() for component in group.pattern.split(".")):
            rule = f"{group.pattern!r} names a layer by number, and the layers of a stack are one parameter"
            problems.append(Problem(KEY, text, rule, "Leave the number out, which means every layer."))
        elif not matching:
            problems.append(Problem(KEY, text, f"{group.pattern!r} matches no parameter", f"There are {', '.join(names)}."))
        elif not members:
            rule = f"all parameters that {group.pattern!r} matches belong to earlier groups: {', '.join(matching)}"
            problems.append(Problem(KEY, text, rule, "Put the narrower pattern first."))
        non_matrices = [name for name in members if not matrices[name]]
        if group.optimizer == "muon" and non_matrices:
            rule = f"{', '.join(non_matrices)} is no matrix, and Muon needs matrices"
            problems.append(Problem(KEY, text, rule, "Name matrices, or leave optimizer out."))
    return problems
