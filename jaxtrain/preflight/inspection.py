"""All checks of one node, in the order of the report, and what must be alike on all nodes of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.preflight import deaths, health, host, joints, network, pace, places, smi, variables, versions
from jaxtrain.preflight.boards import board_of
from jaxtrain.preflight.check import FAULT, NOTE, OK, Asked, Check, Node, Subject, listed, run
from jaxtrain.preflight.machine import TIMED_OUT, Machine

COMMANDS = (*smi.COMMANDS, "dmesg")
APART_S = 2.0  # clocks of two nodes

ANSWERS = Subject(
    "nvidia-smi",
    "it answers",
    "Whatever hangs nvidia-smi hangs the driver: a GPU that has died, or one that is being reset. A run would hang likewise.",
    "Look for Xid in dmesg, then power-cycle the node; nvidia-smi in state D (ps) cannot be killed.",
)
UNLOADED = Subject(
    ANSWERS.name,
    ANSWERS.expected,
    "The driver's kernel module is not loaded, or not built for the kernel that runs, as after an update of the kernel. JAX "
    "then finds no GPU either.",
    "lsmod | grep nvidia shows whether it is loaded, sudo modprobe nvidia loads it or says why not, and dkms status tells for "
    "which kernels it is built. Build it for that of uname -r, or boot one of those. Without GPUs, remove the driver.",
)
FAILS = Subject(
    ANSWERS.name,
    ANSWERS.expected,
    "What it asks is the driver, and JAX asks the same one: where it tells nothing, a run finds no GPU.",
    "Run nvidia-smi by hand and look into dmesg for NVRM; after an update of the driver reboot, so that the module and the "
    "libraries are of one version. Without GPUs, remove the driver.",
)
NO_MODULE = "couldn't communicate with the NVIDIA driver"
ALIKE = {
    "driver": "Drivers of different versions have different faults and speeds, and one node then goes its own way.",
    "GPUs": "A mesh goes at the pace of its slowest GPU, and wants as many of them on every node.",
    "packages": "With other versions of JAX or NCCL a process compiles another program, and hangs in the first collective.",
    "network cards": "NCCL builds its rings over the same card of every node; one that is missing, or down, slows all of them.",
}
COMPARED = (*ALIKE, "clocks")


def look(machine: Machine, asked: Asked) -> tuple[Node, list[Check]]:
    """Everything that can be asked of a node without running it."""
    machine.ask(COMMANDS)
    gpus = smi.gpus(machine)
    node = Node(machine, asked, gpus, board_of(gpus.names))
    found: list[Check] = []
    if gpus.absent:
        # Nothing that is wrong here stops a run on CPUs.
        there = run([*host.PARTS, *places.PARTS], node)
        return node, [dataclasses.replace(c, state=NOTE) if c.state == FAULT else c for c in there]
    found.append(answers(machine, gpus))
    of_gpus = [*health.PARTS, *deaths.PARTS, *pace.PARTS, *joints.PARTS, *network.PARTS] if gpus.rows else []
    found += run([*of_gpus, *versions.PARTS, *host.PARTS, *places.PARTS, *variables.PARTS], node)
    return node, found


def answers(machine: Machine, gpus: smi.Gpus) -> Check:
    hung = [command for command in smi.COMMANDS if machine.run(command).code == TIMED_OUT]
    if len(hung) == len(smi.COMMANDS):
        return ANSWERS.fault(f"no answer in time to any of {len(hung)} questions")
    if hung:
        kinds = list(dict.fromkeys(command.partition("=")[0] for command in hung))
        return ANSWERS.fault(f"no answer in time to {len(hung)} of {len(smi.COMMANDS)} questions: {listed(kinds)}")
    if gpus.rows or not gpus.broken:
        return ANSWERS.ok("it does")
    return (UNLOADED if NO_MODULE in gpus.broken else FAILS).fault(gpus.broken)


def portrait(node: Node, met_unix: float | None) -> dict[str, Any]:
    """What must be alike on every node of a run. met_unix: the node's clock at the moment when all had met."""
    packages = node.machine.packages()
    return {
        "driver": node.gpus.rows[0]["driver_version"] if node.gpus.rows else "none",
        "GPUs": f"{node.gpus.count} x {', '.join(sorted(set(node.gpus.names)))}" if node.gpus.rows else "none",
        "packages": {name: package["version"] for name, package in packages.items()},
        "network cards": len(network.active_cards(node)),
        "met_unix": met_unix,
    }


def alike(hosts: Sequence[str], portraits: Sequence[Mapping[str, Any]]) -> list[Check]:
    """The nodes that differ from most of the others; one line "nodes alike" where none does."""
    found = []
    for what, why in ALIKE.items():
        values = [portrait[what] for portrait in portraits]
        usual = max(values, key=values.count)
        subject = Subject(f"{what} of all nodes", "alike", why, "Bring the nodes to the same state, or leave this one out.")
        for name, value in zip(hosts, values, strict=True):
            if value != usual:
                seen = differing(value, usual) if isinstance(value, dict) else f"{value}, others {usual}"
                found.append(dataclasses.replace(subject.fault(seen), node=name))
    found += clocks(hosts, portraits)
    return found or [Check("nodes alike", OK, f"{', '.join(ALIKE)} and clocks", f"{len(hosts)} nodes", node="all")]


def differing(packages: Mapping[str, str], usual: Mapping[str, str]) -> str:
    names = sorted(name for name in {*packages, *usual} if packages.get(name) != usual.get(name))
    return listed([f"{name} {packages.get(name, 'missing')}, others {usual.get(name, 'none')}" for name in names])


def clocks(hosts: Sequence[str], portraits: Sequence[Mapping[str, Any]]) -> list[Check]:
    """All nodes read their clocks within a moment of each other, when they had met."""
    times = {name: p["met_unix"] for name, p in zip(hosts, portraits, strict=True) if p["met_unix"]}
    if not times or max(times.values()) - min(times.values()) <= APART_S:
        return []
    middle = sorted(times.values())[len(times) // 2]
    far = max(times, key=lambda h: abs(times[h] - middle))
    subject = Subject("clocks of all nodes", f"within {APART_S:g} s", host.CLOCK.why, host.CLOCK.fix)
    return [dataclasses.replace(subject.fault(f"{times[far] - middle:+.1f} s from the others"), node=far)]
