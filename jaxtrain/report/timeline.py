"""A timeline that can be zoomed: lanes of events, drawn on a canvas by assets/timeline.js."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from jaxtrain.report.charts import cursor_data
from jaxtrain.report.html import asset, paragraph, swatch

NS_PER_MS = 1e6


class Stretch(NamedTuple):
    """One event of a lane. Times are in ms since the beginning of the timeline."""

    start: float
    end: float
    kind: str
    part: str
    label: str


def draw(lanes: Mapping[str, Sequence[Stretch]], colours: Mapping[str, str], description: str) -> str:
    """Return the timeline as HTML, with its style and script. A page can have at most one timeline.

    Args:
        lanes: name -> events, at least one in each lane.
        colours: kind of an event -> CSS variable, such as --c1. The legend has the same order.
        description: the timeline in words, for screen readers.
    """
    kinds = [kind for kind in colours if any(s.kind == kind for lane in lanes.values() for s in lane)]
    labels: dict[str, int] = {}
    encoded = []
    for name, lane in lanes.items():
        events: list[int] = []  # four numbers per event: start and duration in ns, index of its kind, index of its label
        for s in lane:
            label = labels.setdefault(", ".join(filter(None, (s.label, s.part))), len(labels))
            events += [round(s.start * NS_PER_MS), round((s.end - s.start) * NS_PER_MS), kinds.index(s.kind), label]
        encoded.append({"name": name, "events": events})
    longest = max(lane[-1].end for lane in lanes.values())
    data = {
        "ns": round(longest * NS_PER_MS),
        "kinds": [[kind, colours[kind]] for kind in kinds],
        "labels": list(labels),
        "lanes": encoded,
    }
    key = " ".join(f"<span>{swatch(f'var({colours[kind]})')}{escape(kind)}</span>" for kind in kinds)
    return (
        f"<style>{asset('timeline.css')}</style>"
        f'<figure class="timeline"><p class="key">{key}</p><canvas role="img" aria-label="Timeline: '
        f'{escape(description)}"></canvas><div class="tip"></div><p class="controls"></p>{cursor_data(data)}</figure>'
        f"<noscript>{paragraph('The timeline needs JavaScript.')}</noscript>"
        f"<script>{asset('timeline.js')}</script>"
    )
