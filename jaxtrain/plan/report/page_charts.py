"""The picture of memory over a plan's schedule, as inline SVG that keeps its letters at one size however wide the page is.

Positions along x are percentages, so the browser stretches the drawing and not the text; only the curves lie in a nested svg
that is stretched as a whole.
"""

import itertools
from collections.abc import Sequence
from html import escape

from jaxtrain.page.charts import ticks
from jaxtrain.plan.numbers import size
from jaxtrain.plan.result import Plan

HEIGHT = 280  # of the chart's plot, px; page.css says the same
LETTER = 7.5  # px of an average one at the size of labels, generously
NARROW, WIDE = 560, 900  # px that the plot has at least: on a narrow page, and where .roomy is shown (page.css)
# A class of memory has the same colour in every plan; those that are not named here are small, and share one.
COLOUR_OF = {
    "saved activations": 1,
    "gathered weights": 2,
    "first moment": 3,
    "parameters": 4,
    "logits and loss": 5,
    "gradients": 6,
    "second moment": 7,
}
REST = 8


def colour(name: str) -> str:
    """CSS colour of a class of memory."""
    return f"var(--c{COLOUR_OF.get(name, REST)})"


def runs(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """(phase, first, last) of each stretch of the schedule in one phase."""
    out, first = [], 0
    for phase, points in itertools.groupby(phases):
        n = len(list(points))
        out.append((phase, first, first + n - 1))
        first += n
    return out


def memory_chart(plan: Plan) -> str:
    """GiB held over the schedule, what is held throughout apart from the rest, with phases, usable memory and the peak."""
    m = plan.memory
    held = [gib for gib, _ in m.timeline]
    last = max(1, len(held) - 1)
    top = 1.12 * max(m.usable_gib, m.peak_gib, *held)

    def x(i: float) -> str:
        return f"{100 * i / last:.2f}%"

    def y(gib: float) -> float:
        return HEIGHT * (1 - gib / top)

    def curve(values: Sequence[float]) -> str:
        return " ".join(f"{1000 * i / last:.1f},{1000 * (1 - v / top):.2f}" for i, v in enumerate(values))

    def text(at: str, y: float, anchor: str, kind: str, words: str) -> str:
        return f'<text x="{at}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'

    highest = max(range(len(held)), key=held.__getitem__)
    alternative = (
        f"Memory held on each GPU over the schedule of one step: between {size(min(held))} and {size(held[highest])}, highest "
        f"in phase {m.timeline[highest][1] or 'start'}; {size(m.usable_gib)} are usable."
    )
    out = [f'<svg role="img" aria-label="{escape(alternative)}">']
    for n, (phase, first, end) in enumerate(runs([phase for _, phase in m.timeline])):
        # A point stands for the stretch up to the next one, so bands meet there.
        begin, finish = 100 * first / last, 100 * min(end + 1, last) / last
        if n % 2 == 0:
            out.append(f'<rect class="band" x="{begin:.2f}%" y="-26" width="{finish - begin:.2f}%" height="{HEIGHT + 26}"/>')
        needs = LETTER * len(phase)
        if phase and needs <= (finish - begin) / 100 * WIDE:
            kind = "axis" if needs <= (finish - begin) / 100 * NARROW else "axis roomy"
            out.append(text(f"{(begin + finish) / 2:.2f}%", -10, "middle", kind, phase))
    for tick in ticks(0, top, 7):
        out.append(f'<line class="grid" x1="0" x2="100%" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(text("-8", y(tick) + 4, "end", "axis", f"{tick:g}"))
    out.append(text("-8", -10, "end", "axis", "GiB"))

    throughout = [min(v, m.arguments_gib) for v in held]
    area = f"0,1000 {curve(held)} {1000 * (len(held) - 1) / last:.1f},1000"
    below = f"0,1000 {curve(throughout)} {1000 * (len(held) - 1) / last:.1f},1000"
    out.append('<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible">')
    limit = max(0.0, 1000 * (1 - m.usable_gib / top))
    out.append(f'<clipPath id="too-much"><rect width="1000" height="{limit:.2f}"/></clipPath>')
    out.append(f'<polygon class="temporary" points="{area}"/><polygon class="throughout" points="{below}"/>')
    out.append(f'<polygon class="over" points="{area}" clip-path="url(#too-much)"/>')
    out.append(f'<polyline class="held" points="{curve(held)}"/></svg>')

    out.append(f'<line class="usable" x1="0" x2="100%" y1="{y(m.usable_gib):.1f}" y2="{y(m.usable_gib):.1f}"/>')
    # The two labels keep to opposite halves, so they never meet.
    right = highest > last / 2
    edge, anchor = ("6", "start") if right else ("99.5%", "end")
    out.append(text(edge, y(m.usable_gib) - 7, anchor, "halo", f"usable {size(m.usable_gib)}"))
    out.append(f'<circle class="peak" cx="{x(highest)}" cy="{y(held[highest]):.1f}" r="5"/>')
    above = y(held[highest]) - 11
    out.append(text(x(highest), above, "end" if right else "start", "halo", f"peak {size(held[highest])}"))
    out.append(text("0", HEIGHT + 18, "start", "axis", "start of the step"))
    out.append(text("100%", HEIGHT + 18, "end", "axis", "end"))
    out.append(f'<line class="cursor" x1="0" x2="0" y1="0" y2="{HEIGHT}"/></svg>')
    return "".join(out)
