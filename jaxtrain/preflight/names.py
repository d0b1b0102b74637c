"""The names of all checks, for `--allow`: a name that is none of them is a mistake, and must not do nothing in silence."""

from jaxtrain.config import Problem, nearest
from jaxtrain.preflight import deaths, health, host, inspection, joints, judge, network, pace, places, variables, versions
from jaxtrain.preflight.check import Subject

ROOMS = (deaths, health, host, inspection, joints, judge, network, pace, places, variables, versions)


def known() -> list[str]:
    """Every name that a fault can have."""
    subjects = {value.name for room in ROOMS for value in vars(room).values() if isinstance(value, Subject)}
    subjects |= {f"disk {name}" for name in places.WHY} | {f"{what} of all nodes" for what in inspection.COMPARED}
    return sorted(subjects - {places.DISKS.name})  # the places have a line each


def unknown(key: str, names: list[str]) -> list[Problem]:
    """Those that no check is called. `key`: the option or the variable that names them."""
    checks = known()
    spelt = {check.lower(): check for check in checks}
    rule = "no check whose fault could be allowed is called that"
    remedies = {name: spelt.get(name.lower()) for name in names if name not in checks}
    return [Problem(key, n, rule, f"Did you mean {near}?" if near else nearest(n, checks)) for n, near in remedies.items()]
