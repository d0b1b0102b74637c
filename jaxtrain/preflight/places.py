"""The places of state that a run reads and writes: is there room, and do two of them share what they should not?

Data is read all the time, checkpoints are written in bursts, the compile cache is many small files. They may lie on one disk;
then a save slows the input down, and a full disk ends both.
"""

from collections.abc import Iterable

from jaxtrain import flops
from jaxtrain.preflight.check import Check, Node, Subject, listed
from jaxtrain.preflight.machine import Disk
from jaxtrain.stores import is_bucket

LEAST_GIB = {"data": 1.0, "checkpoints": 10.0, "cache": 1.0}  # free; of checkpoints where no config says how large they are
BYTES_A_WEIGHT = 12  # the float32 master and Adam's two moments
MEMORY = ("tmpfs", "ramfs")
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "smb3", "cifs", "wekafs", "9p", "virtiofs")
KEYS = {"data": "paths.data", "checkpoints": "checkpoint.dir or --workdir", "cache": "paths.cache"}

WHY = {
    "data": "The corpus that jaxtrain makes itself is written there, and the input is read from there.",
    "checkpoints": "A save that finds no room fails, and with it everything since the last one is at stake.",
    "cache": "Without room XLA keeps no compiled programs, and each start compiles again for minutes.",
}
SHARED = Subject(
    "places",
    "data, checkpoints and compile cache where each belongs",
    "Data, checkpoints and cache differ in traffic: on one disk a save slows the input, and what is full for one "
    "is full for all.",
    "Set paths.data, checkpoint.dir and paths.cache to file systems that suit them; keep the cache on a local disk.",
)


def rooms(node: Node) -> Iterable[Check]:
    disks = node.machine.disks()
    for name, place in node.asked.places.items():
        subject = Subject(
            f"disk {name}", f"{needed(node, name):,.0f} GiB free", WHY[name], f"Make room, or set {KEYS[name]} to another disk."
        )
        if not place:
            yield subject.ok("not used")
        elif is_bucket(place):
            yield subject.unknown(f"{place} is a bucket")
        elif name not in disks:
            yield subject.unknown(f"{place} cannot be looked at")
        elif disks[name].silent:
            hangs = Subject(
                subject.name,
                "its file system answers",
                "A run that touches a file system whose server is gone waits for it, and hangs without an error.",
                f"Mount it anew, or set {KEYS[name]} to another file system.",
            )
            seen = f"{disks[name].path} did not answer: its file system hangs"
            yield hangs.note(seen) if name == "cache" else hangs.fault(seen)
        else:
            yield room(node, subject, name, disks[name])


def sharing(node: Node) -> Check:
    disks = node.machine.disks()
    return shared({name: disks[name] for name in node.asked.places if name in disks and not disks[name].silent})


def needed(node: Node, name: str) -> float:
    """GiB that should be free. Of checkpoints: two, the last whole one and the one being written."""
    if name != "checkpoints" or not node.asked.named:
        return LEAST_GIB[name]
    return max(2 * flops.parameters(node.asked.run.model)["total"] * BYTES_A_WEIGHT / 2**30, 0.1)


def room(node: Node, subject: Subject, name: str, disk: Disk) -> Check:
    seen = f"{disk.free_gib:,.1f} of {disk.total_gib:,.0f} GiB free at {disk.path} ({disk.kind})"
    if name == "checkpoints" and disk.kind in MEMORY:
        lasting = Subject(
            subject.name,
            "on a disk, which outlives the node",
            "Checkpoints in memory are gone when the node restarts, which is when the run needs them; and they take the "
            "host's memory from the run.",
            f"Set {KEYS[name]} to a disk that outlives the node.",
        )
        return lasting.fault(f"{seen}: in memory")
    if disk.free_gib < needed(node, name):
        return subject.fault(seen)
    return subject.ok(seen)


def shared(disks: dict[str, Disk]) -> Check:
    odd = []
    if "data" in disks and "checkpoints" in disks and disks["data"].device == disks["checkpoints"].device:
        odd.append(f"data and checkpoints share {disks['data'].mount}")
    for name, kinds, text in (
        ("cache", NETWORK, "over the network"),
        ("checkpoints", ("overlay",), "in the container, gone with it"),
    ):
        if name in disks and disks[name].kind in kinds:
            odd.append(f"{name} {text} ({disks[name].kind})")
    if odd:
        return SHARED.note("; ".join(odd))
    return SHARED.ok(listed([f"{name} on {disk.mount} ({disk.kind})" for name, disk in disks.items()]))


DISKS = Subject("disks", "room at each of the run's places", WHY["checkpoints"], "See the places that the config names.")
PARTS = ((DISKS, rooms), (SHARED, sharing))
