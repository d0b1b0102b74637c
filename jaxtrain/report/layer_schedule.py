"""The schedule of one layer's forward and backward pass, by the roofline: computation and overlapping communication."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.plan.program import collectives, roofline
from jaxtrain.plan.program.hlo import Module
from jaxtrain.plan.result import Rates
from jaxtrain.plan.topology import Topology

LINKS = ("communication", "host copies")


class LaneEvent(NamedTuple):
    """One event of a lane. Times are in ms since the start of the pass."""

    start: float
    end: float
    kind: str
    label: str


def layer_events(
    module: Module, mesh: dict[str, int], topology: Topology, rates: Rates, layers: float
) -> dict[str, list[LaneEvent]]:
    """Return the events of the layer of median duration, in the forward pass and in the backward pass.

    A layer lasts from the start of its attention kernel to the start of the next layer's attention kernel. Times start at 0 ms
    in each pass.

    Args:
        module: the scheduled program.
        mesh: axis -> size.
        layers: passes of one device through a layer in a step: layers on the device x microbatches.

    Returns:
        name of the lane, such as "forward: computation" or "backward: links" -> its events. {} for a program without attention
        kernels, or if `layers` is 1.
    """
    events: list[LaneEvent] = []

    def record(name: str, work: str, start: float, end: float) -> None:
        if not work.startswith(roofline.EXPOSED):
            op_name = module.instruction(name).op_name
            events.append(LaneEvent(start * 1e3, end * 1e3, roofline.KIND_OF_WORK[work], roofline.op_label(op_name) or name))

    roofline.predict(module, rates, collectives.read_collectives(module, mesh, topology.gpus), record)
    lanes: dict[str, list[LaneEvent]] = {}
    for phase in ("forward", "backward"):
        window = _window([e.start for e in events if e.kind == "attention" and e.label.startswith(phase)], layers)
        if window is None:
            continue
        begin, end = window
        for title, is_link in (("computation", False), ("links", True)):
            inside = [
                e._replace(start=max(e.start, begin) - begin, end=min(e.end, end) - begin)
                for e in events
                if (e.kind in LINKS) is is_link and e.end > begin and e.start < end
            ]
            if inside:
                lanes[f"{phase}: {title}"] = inside
    return lanes


def _window(starts: Sequence[float], layers: float) -> tuple[float, float] | None:
    """Return (start, end) of the layer of median duration; None without two layers. starts: start of each attention kernel."""
    kernels = max(1, round(len(starts) / layers))  # attention kernels of one layer: a ring has several
    marks = starts[::kernels]
    pairs = list(zip(marks, marks[1:], strict=False))
    if not pairs:
        return None
    typical = statistics.median_low([end - begin for begin, end in pairs])
    return next(pair for pair in pairs if pair[1] - pair[0] == typical)
