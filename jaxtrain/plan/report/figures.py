"""What a plan's report and page both say: its reductions and its sentences. Numbers are written as numbers.py says."""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence

from jaxtrain.config import RunConfig
from jaxtrain.plan.numbers import GB_PER_GIB, column, gib, number, percent, rough, size
from jaxtrain.plan.rates import ATTENTION_AT, PALLAS_FRACTION, PUBLISHED, compilers, fraction
from jaxtrain.plan.result import SHOWN, Collective, Kernel, Plan
from jaxtrain.plan.topology import CHIPS

SECONDS_PER_DAY = 86_400
TRILLION = 1e12
SMALL = 0.002  # of the peak: a class of memory below this has no row of its own

ASSUMPTIONS = (
    "kernels run one after another; collectives run beside them, one at a time, where the compiler scheduled them, for bytes "
    "over a link rate that grows with the message, plus a latency for each node passed; neither slows the other; nothing waits "
    "for data, saves, stragglers or clocks"
)


def place(source: str) -> str:
    """file:line from the package on, wherever that is installed."""
    for package, kept in (("/site-packages/", ""), ("/jaxtrain/", "jaxtrain/")):
        before, found, inside = source.rpartition(package)
        source = kept + inside if found else source
    return source


# ---- reductions


def verdict(plan: Plan) -> str:
    """Does it fit, and by how much."""
    m = plan.memory
    unit, (taken, usable, margin) = gib([m.taken_gib, m.usable_gib, abs(m.usable_gib - m.taken_gib)])
    if plan.fits:
        return f"fits: takes {taken} of {usable} {unit} usable, {margin} {unit} to spare"
    return f"does not fit: takes {taken} of {usable} {unit} usable, {margin} {unit} too much"


def in_pieces(plan: Plan) -> str:
    """What a run has to give above the peak: the compiler's heap is taken whole, with the gaps between its arrays."""
    m = plan.memory
    unit, (taken, gaps) = gib([m.taken_gib, m.taken_gib - m.peak_gib])
    return f"a run takes {taken} {unit}, {gaps} of it gaps between arrays"


def headline(plan: Plan) -> str:
    """How fast, in one line: first what is to be expected."""
    t = plan.time
    given = "" if plan.fits else "if it did fit, "
    first = f"{given}{expected(plan)}; " if t.expected_step_ms else f"{no_range(plan)}; {given}"
    return (
        f"{first}roofline: step {rough(t.step_ms)} ms, "
        f"{rough(t.tokens_per_s_per_device, 4)} tokens/s/GPU, MFU {mfu(plan)}, bound by {t.bound_by}" + supposed(plan)
    )


NOT_COMPARABLE = "no comparable published run"
CALIBRATED = "calibrated rates, whose error is not known"


def expected(plan: Plan) -> str:
    """The range of step time, speed and MFU that published runs of this kind lead to expect."""
    t = plan.time
    if not (steps := t.expected_step_ms) or not (speeds := t.expected_tokens_per_s_per_device):
        return no_range(plan)
    return f"expected: step {span(steps)} ms, {span(speeds)} tokens/s/GPU, MFU {expected_mfu(plan)}"


def expected_mfu(plan: Plan) -> str:
    """The range of causal MFU that published runs of this kind lead to expect, under FP8 of both peaks; "" without one."""
    t = plan.time

    def ends(mfu: float) -> str:
        return " to ".join(percent(mfu * t.step_ms / each) for each in reversed(t.expected_step_ms or ()))

    if t.expected_step_ms is None:
        return ""
    of_fp8 = "" if t.mfu_fp8_peak is None else f" of the bf16 peak, {ends(t.mfu_fp8_peak)} of the FP8 peak"
    return f"{ends(t.mfu_causal)} causal{of_fp8}"


def no_range(plan: Plan) -> str:
    """Why a plan expects no range of times: the ratios to published runs are those of published kernel rates."""
    return NOT_COMPARABLE if plan.rates.source == PUBLISHED else CALIBRATED


def span(low_high: tuple[float, float] | None) -> str:
    """Both ends of a range, to three digits; '-' where there is none."""
    return " to ".join(rough(end) for end in low_high) if low_high else "-"


def mfu(plan: Plan) -> str:
    """Causal; under FP8 of both peaks."""
    t = plan.time
    of_fp8 = "" if t.mfu_fp8_peak is None else f" of the bf16 peak, {percent(t.mfu_fp8_peak)} of the FP8 peak"
    return f"{percent(t.mfu_causal)} causal{of_fp8}"


def supposed(plan: Plan) -> str:
    """The load of experts that a plan supposes; "" for a model without."""
    return f", experts' load {load(plan.experts.load)}" if plan.experts else ""


def load(shares: float) -> str:
    """A load of experts with one digit after the point at least: 1.0."""
    return f"{shares:.1f}" if round(shares, 1) == shares else f"{shares:g}"


def host_waits(plan: Plan) -> str:
    """How often the host waits for a number on the GPU, and for what; "" where it never does."""
    most = sorted(plan.host_waits.items(), key=lambda kv: -kv[1])
    named = [f"{n:,} x {name}" for name, n in most[:SHOWN]] + [f"{len(most) - SHOWN} more"] * (len(most) > SHOWN)
    waits = sum(plan.host_waits.values())
    text = f"the host waits for the GPU {waits:,} times a step, which no time above counts, to read a loop's end or a branch"
    return f"{text}: {', '.join(named)}" if waits else ""


def card(plan: Plan) -> str:
    """What of the card's memory a run may use."""
    m = plan.memory
    unit, (all_of_it, reserve, usable) = gib([m.hbm_gib, m.reserve_gib, m.usable_gib])
    return f"a card has {all_of_it} {unit}: {reserve} stay with NCCL and the CUDA context, {usable} are usable"


def peak_at(plan: Plan) -> str:
    """Where in the schedule the peak is, how it divides, and the workspace that cuDNN's attention takes while it runs."""
    m = plan.memory
    unit, (arguments, temporary) = gib([m.arguments_gib, m.temp_gib])
    cudnn = (
        f"; cuDNN workspace {size(m.workspace_gib)}, by {m.workspace_by.replace('cudnn', 'cuDNN')}" if m.workspace_gib else ""
    )
    return f"reached in {m.peak_at}; state and batch {arguments} {unit} throughout, temporaries {temporary} {unit}{cudnn}"


def devices(plan: Plan) -> int:
    """GPUs of the mesh."""
    return math.prod(plan.mesh.values())


def classes(plan: Plan) -> list[tuple[str, float]]:
    """(class, GiB) at the peak, largest first; those too small to show are one entry."""
    m = plan.memory
    ordered = sorted(m.by_class.items(), key=lambda kv: -kv[1])
    small = [(name, held) for name, held in ordered if held < SMALL * m.peak_gib]
    if len(small) < 2:
        return ordered
    return [*ordered[: -len(small)], (f"{len(small)} others", math.fsum(held for _, held in small))]


def mesh(plan: Plan) -> str:
    """The axes that split anything, as 'fsdp=8 tensor=2'."""
    return " ".join(f"{axis}={n}" for axis, n in plan.mesh.items() if n > 1) or "one GPU"


def remat(run: RunConfig) -> str:
    """The policy; of a custom one, what it keeps."""
    r = run.remat
    over = f", {r.every} layers each" if r.every > 1 else ""
    if r.policy != "custom":
        return r.policy + over
    items = [item.replace("=keep", "") for item in r.tensors.split(",")]
    return "keep " + " ".join(items) + over


def command(plan: Plan) -> str:
    """The command line that makes this plan again."""
    overrides = [o if o.startswith("--") else f"--config.{o}" for o in plan.overrides]
    # A machine that has no description in specs/ is the one that the plan was made on.
    machine = [f"--topology={plan.topology}"] if plan.topology.partition(":")[0] in CHIPS else []
    busiest = [f"--experts-load={load(plan.experts.load)}"] if plan.experts and plan.experts.load != 1 else []
    return shlex.join(["python", "-m", "jaxtrain.plan", f"--config={plan.config}", *overrides, *machine, *busiest])


def moved(plan: Plan) -> list[Collective]:
    """Collectives by what they are and the line that caused them, longest first; `instruction` is that of the longest."""
    groups: dict[tuple[str, str, str, int, str], list[Collective]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, c.dtype, c.axis, c.group, c.source), []).append(c)
    merged = [added(sorted(group, key=lambda c: -c.ms)) for group in groups.values()]
    return sorted(merged, key=lambda c: (-c.ms, -c.wire_gib))


def added(group: Sequence[Collective]) -> Collective:
    """The first of a group with the counts, bytes and times of all."""
    sums = {f: sum(getattr(c, f) for c in group) for f in ("count", "wire_gib", "network_gib", "ms", "exposed_ms")}
    return dataclasses.replace(group[0], **sums)


def ran(plan: Plan) -> list[Kernel]:
    """Kernels by time, without the collectives, which are listed for themselves."""
    return sorted((k for k in plan.kernels if k.kind != "communication"), key=lambda k: -k.ms)


def step_parts(plan: Plan) -> list[tuple[str, float]]:
    """(what, ms) of a step; together they are the step."""
    t = plan.time
    parts = [
        ("GEMM", t.gemm_ms),
        ("attention", t.attention_ms),
        ("memory-bound", t.memory_ms),
        ("exposed communication", t.exposed_ms),
    ]
    return [*parts, ("waiting for the host", t.host_exposed_ms)] if t.host_exposed_ms else parts


TRAINING = ("", "tokens", "steps", "days", "GPU-hours")


def training(plan: Plan, steps: int | None) -> list[tuple[str, ...]]:
    """Cells under TRAINING: the config's own number of steps, where given, and every trillion tokens.

    By the expected step time where there is one, else by the roofline: saves, evaluations and restarts come on top.
    """
    rows = [("this config", float(steps * plan.tokens_per_step), f"{steps:,}")] if steps else []
    rows.append(("each trillion", TRILLION, rough(TRILLION / plan.tokens_per_step)))
    steps_ms = plan.time.expected_step_ms or (plan.time.step_ms,)
    out = []
    for what, tokens, count in rows:
        days = [tokens / plan.tokens_per_step * ms / 1e3 / SECONDS_PER_DAY for ms in steps_ms]
        hours = (rough(each * 24 * devices(plan)) for each in days)
        out.append((what, f"{rough(tokens / 1e9)} B", count, " to ".join(map(rough, days)), " to ".join(hours)))
    return out


def off_by(plan: Plan) -> str:
    """Return the source of the expected range, or the reason why there is none."""
    if not (steps := plan.time.expected_step_ms):
        return f"{no_range(plan)}: the roofline leaves out what makes a real step longer, and by how much is not known here"
    low, high = (plan.time.step_ms / each for each in reversed(steps))
    of = ", ".join(filter(None, (plan.kind, compilers(plan.kind))))
    return f"expected by published runs ({of}): there the roofline was {low:.2f} to {high:.2f} of the measured step time"


def rates(plan: Plan) -> str:
    """The rates behind the times, of what this program uses, and where they come from."""
    r = plan.rates
    slower = PALLAS_FRACTION if plan.attention == "pallas" else 1.0
    forward, backward = (slower * x for x in (r.attention_forward_tflops, r.attention_backward_tflops))
    small = ((mib, r.nvlink_gb_s * fraction(r.collective_curve, mib * 2**20)) for mib in (64, 1))
    by_size = " and ".join(f"{number(gb_s)} at {mib} MiB" for mib, gb_s in small)
    parts = [
        f"GEMM {number(r.gemm_tflops, 0)} TFLOP/s" + (f", in FP8 {number(r.fp8_tflops, 0)}" if plan.matmuls else ""),
        f"{'Pallas ' if slower < 1 else ''}attention {number(forward, 0)} forward, {number(backward, 0)} backward at "
        f"{ATTENTION_AT:,} tokens",
        f"memory {number(r.memory_tb_s)} TB/s",
        f"NVLink {number(r.nvlink_gb_s, 0)} GB/s for large messages, {by_size}",
    ]
    if any(c.network_gib for c in plan.collectives):
        parts.append(f"network {number(r.network_gb_s, 0)} GB/s + {number(r.network_latency_us, 0)} us from node to node")
    if plan.memory.host_gib:
        parts.append(f"host {number(r.host_gb_s, 0)} GB/s")
    return f"{r.source}: {', '.join(parts)}"


def work(plan: Plan) -> str:
    """What a token costs by formula, and what the program executes."""
    f = plan.flops
    parted = f.hardware_per_step / f.expected_per_step - 1 if f.expected_per_step else math.nan
    against = f"{100 * parted:+.1f}%" if math.isfinite(parted) else "-"
    return (
        f"{number(f.per_token_causal / 1e9, 2)} GFLOP a token causal, {number(f.per_token_full / 1e9, 2)} full; a step "
        f"executes {number(f.hardware_per_step / 1e12)} TFLOP a GPU, {against} against the formula "
        "with what remat computes again"
    ) + balance(plan)


def matmuls(plan: Plan) -> str:
    """Under precision=fp8, which products of a layer are in 8 bits, and what MFU is a part of; "" otherwise."""
    if not (m := plan.matmuls):
        return ""
    text = f"matrix products in FP8: {m.eight:g} of {m.products:g} a layer"
    text += f"; wider: {m.some_wide}" if m.wide else ""
    return f"{text}. MFU and HFU are parts of the bfloat16 peak, where no other is named: a step multiplies in both types"


def pipeline(plan: Plan) -> list[str]:
    """How microbatches pass through stages; nothing without."""
    if not (p := plan.pipeline):
        return []
    groups = f", {p.groups} groups of layers each" if p.groups > 1 else ""
    sent = column([gib * GB_PER_GIB for gib in (p.permute_gib, p.reduce_gib, p.network_gib)])
    network = f", {sent[2]} GB of it over the network" if p.network_gib else ""
    on_links, waited = column([p.ms, p.exposed_ms])
    return [
        f"{p.schedule} over {p.stages} stages{groups}, {p.microbatches} microbatches; layers {' | '.join(p.layers)}",
        f"a stage has nothing to do for {percent(p.bubble)} of the step by formula, (stages - 1) / (groups x microbatches + "
        f"stages - 1), and in {percent(p.idle)} of the program's passes",
        f"at most {p.in_flight:g} microbatches wait for their backward pass on a stage: {size(p.saved_gib)} on each GPU",
        f"over stage each GPU sends {sent[0]} GB to its neighbours and {sent[1]} GB to all stages{network}: {on_links} ms, of "
        f"which it waits for {waited} ms",
    ]


def experts(plan: Plan) -> list[str]:
    """Where experts are, and how tokens reach them; nothing for a model without."""
    if not (x := plan.experts):
        return []
    where = f"{x.experts // x.devices} on each of {x.devices} GPUs" if x.devices > 1 else "all on each GPU"
    lines = [
        f"{x.experts} experts a layer, {where}, {x.per_token} for each token: {x.rows:,.0f} rows of a microbatch and layer on "
        f"a GPU, in room for {x.room:,.0f}"
    ]
    if x.devices > 1:
        lines.append(
            f"all-to-all of a layer and microbatch, forward and backward: {number(x.layer_gib * GB_PER_GIB)} GB from each GPU, "
            f"{number(x.layer_exposed_ms)} ms of it waited for; {number(x.exposed_ms)} ms in the step"
        )
    rounds = f"each exchange takes {x.rounds} round{'s' * (x.rounds > 1)}"
    lines.append(
        f"an expert takes {x.capacity:g} even shares at most, all of whose places are computed; what is more is dropped"
        if x.capacity
        else f"experts' load {load(x.load)}: the busiest draws {load(x.load)} times its even share, "
        + (rounds if x.devices > 1 else "and rows are as many at any load")
    )
    return lines


def balance(plan: Plan) -> str:
    """How evenly the ranks of a split sequence share attention; "" where there is one."""
    asked = plan.flops.attention_by_rank
    if not asked:
        return ""
    apart = max(asked) / min(asked) - 1
    text = f"; of attention the causal mask asks {number(max(asked) / 1e12)} TFLOP of each of {len(asked)} ranks of seq"
    text += f" (largest over smallest: {100 * apart:+.1f}%)"
    computed = plan.flops.attention_per_step
    return text + (f", which compute {number(computed / 1e12)} each" if computed else "")


def built(plan: Plan) -> str:
    """Compiler, its options and how long it took."""
    versions = ", ".join(f"{name} {v}" for name, v in plan.versions.items())
    options = " ".join(f"{name}={v}" for name, v in plan.options.items()) or "none"
    return f"compiled in {number(plan.compile_s, 0)} s by {versions}; compiler options: {options}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; columns of numbers stand to the right."""
    rows = [list(cells) for cells in rows]
    right = [all(cells[i][:1].isdigit() or cells[i] == "-" for cells in rows) for i in range(len(headings))]
    rule = ["---:" if r else "---" for r in right]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]
