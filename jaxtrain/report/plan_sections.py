"""The report of a plan: its verdict, its figures, and its sections, for terminal and page."""

import dataclasses
import math
import re
import shlex
from collections.abc import Sequence

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import GB_PER_GIB, column, gib, number, percent, plural, rough, size
from jaxtrain.config.schema import Remat
from jaxtrain.plan.cost import Cost
from jaxtrain.plan.program.roofline import op_label
from jaxtrain.plan.rates import ATTENTION_AT, PALLAS_ATTENTION, PUBLISHED, fp8_attention, published_ranges, rate_fraction
from jaxtrain.plan.result import SHOWN, Collective, Plan
from jaxtrain.plan.topology import CHIPS
from jaxtrain.report.charts import stacked_bar
from jaxtrain.report.plan_run import run_section
from jaxtrain.report.tables import Column, Drawing, Listing, Section, Table, bars, counts, labels, numbers, shares

TRILLION = 1e12
SMALL = 0.002  # of the peak; smaller classes of memory share a row
ROWS = 5  # collectives on a terminal
PAGE_ROWS = 40  # kernels and arrays on the page
ASSUMPTIONS = (
    "kernels run one after another; collectives overlap with them, one at a time, as the compiler scheduled them; a "
    "collective takes its bytes over a link rate that grows with the message, plus a latency for each node it crosses; neither "
    "slows the other; waits for data, checkpoints, stragglers and lower clocks are left out"
)
# A class of memory has the same colour in every plan. All classes that are not listed share OTHER_CLASS.
CLASS_COLOURS = {
    "saved activations": "var(--c1)",
    "gathered weights": "var(--c2)",
    "first moment": "var(--c3)",
    "parameters": "var(--c4)",
    "logits and loss": "var(--c5)",
    "gradients": "var(--c6)",
    "second moment": "var(--c7)",
    "temporaries": "var(--c8)",
    "cuDNN workspace": "var(--c9)",
    "copies of parameters": "var(--c10)",
}
OTHER_CLASS = "var(--c11)"
TEMPORARIES = 4  # most parts of the temporaries that have rows of their own
PART_COLOURS = {
    "GEMM": "var(--c1)",
    "attention": "var(--c4)",
    "memory-bound": "var(--c2)",
    "exposed communication": "var(--c5)",
    "host": "var(--c8)",
}


def warnings_section(plan: Plan) -> Section:
    """Return the section of warnings."""
    return Section("Warnings", [Listing(plan.warnings, "warning")])


def summary(plan: Plan, steps: int | None = None, tokens: int = 0, epochs: str = "", cost: Cost | None = None) -> list[Section]:
    """Return the sections that both terminal and page show: for a step that does not fit, only memory.

    Args:
        steps: training steps of the config, for the time to train.
        tokens: of those steps; 0: all steps have those of the plan.
        epochs: those steps as epochs, in words; "" if unknown.
        cost: the whole run of --tokens.
    """
    if not plan.fits:
        return [memory_section(plan)]
    return [
        memory_section(plan),
        time_section(plan, steps, tokens, epochs),
        *run_section(cost),
        collectives_section(plan),
        Section("Pipeline", [Listing(pipeline(plan))]),
        Section("Experts", [Listing(experts(plan))]),
    ]


def details(plan: Plan) -> list[Section]:
    """Return the last sections of the page, which the terminal does not show."""
    counted = [rates(plan), f"model: {ASSUMPTIONS}", work(plan), compiler(plan)]
    return [
        memory_details(plan),
        arrays_section(plan),
        *([kernels_section(plan), loops_section(plan)] if plan.fits else []),
        Section("Sources of the figures", [Listing(counted)]),
    ]


# ---- verdict and headline


def verdict(plan: Plan) -> str:
    """Return one line: whether the step fits, and its free or missing memory."""
    memory = plan.memory
    unit, (allocated, usable, margin) = gib([memory.taken_gib, memory.usable_gib, abs(memory.usable_gib - memory.taken_gib)])
    if plan.fits and memory.taken_gib < 1 <= memory.usable_gib:
        return f"fits: {size(memory.taken_gib)} of {usable} {unit} usable memory"
    if plan.fits:
        return f"fits: {allocated} of {usable} {unit} usable memory, {margin} {unit} free"
    return f"does not fit: needs {allocated} {unit}, {usable} {unit} usable: {margin} {unit} missing"


def headline(plan: Plan) -> str:
    """Return the speed in one line, expected range first; "no speed: ..." for a step that does not fit."""
    if not plan.fits:
        return "no speed: the step does not fit"
    time = plan.time
    load = f", expert load {expert_load(plan.experts.load)}" if plan.experts else ""
    return (
        f"{range_text(plan)}; roofline: step {rough(time.step_ms)} ms, {rough(time.tokens_per_s_per_device, 4)} tokens/s/GPU, "
        f"MFU {mfu(plan)}, bound by {time.bound_by}{load}"
    )


def range_text(plan: Plan) -> str:
    """Return the expected range of step time, speed and MFU, or the reason why there is none."""
    time = plan.time
    if not (steps := time.expected_step_ms) or not (speeds := time.expected_tokens_per_s_per_device):
        return no_range(plan)
    return f"expected: step {span(steps)} ms, {span(speeds)} tokens/s/GPU, MFU {expected_mfu(plan)}"


def expected_mfu(plan: Plan) -> str:
    """Return the expected range of causal MFU; "" without a range. precision=fp8 has one range per peak: bf16 and FP8."""
    time = plan.time
    if time.expected_step_ms is None:
        return ""

    def ends(mfu: float) -> str:
        return " to ".join(percent(mfu * time.step_ms / each) for each in reversed(time.expected_step_ms or ()))

    fp8_note = "" if time.mfu_fp8_peak is None else f" of the bf16 peak, {ends(time.mfu_fp8_peak)} of the FP8 peak"
    return f"{ends(time.mfu_causal)} causal{fp8_note}"


def no_range(plan: Plan) -> str:
    """Return the reason why a plan has no expected range: calibrated rates, or no comparable published run."""
    return "no comparable published run" if plan.rates.source == PUBLISHED else "calibrated rates, whose error is not known"


def range_source(plan: Plan) -> str:
    """Return the source of the expected range; "" without a range."""
    if not (steps := plan.time.expected_step_ms):
        return ""
    low, high = (plan.time.step_ms / each for each in reversed(steps))
    runs = ", ".join(filter(None, (plan.kind, published_ranges()["compilers"].get(plan.kind))))
    return f"The expected range is by published runs ({runs}): their roofline was {low:.2f} to {high:.2f} of the measured time"


def mfu(plan: Plan) -> str:
    """Return the causal MFU of the roofline. precision=fp8 has one MFU per peak: bf16 and FP8."""
    time = plan.time
    fp8_note = "" if time.mfu_fp8_peak is None else f" of the bf16 peak, {percent(time.mfu_fp8_peak)} of the FP8 peak"
    return f"{percent(time.mfu_causal)} causal{fp8_note}"


def span(low_high: tuple[float, float] | None) -> str:
    """Return both ends of a range, to three digits; '-' without a range."""
    return " to ".join(rough(end) for end in low_high) if low_high else "-"


def expert_load(shares: float) -> str:
    """Return an expert load as text with at least one decimal: 1.0."""
    return f"{shares:.1f}" if round(shares, 1) == shares else f"{shares:g}"


def mesh(plan: Plan) -> str:
    """Return the mesh axes of more than one device, as 'fsdp=8 tensor=2'."""
    return " ".join(f"{axis}={n}" for axis, n in plan.mesh.items() if n > 1) or "one GPU"


def device_count(plan: Plan) -> int:
    """Return the number of GPUs of the mesh."""
    return math.prod(plan.mesh.values())


def describe_remat(remat: Remat) -> str:
    """Return the remat policy, or the activations that "custom" saves, and remat.every if it is above 1."""
    every = f", {remat.every} layers each" if remat.every > 1 else ""
    if remat.policy != "custom":
        return remat.policy + every
    return "keep " + " ".join(item.replace("=keep", "") for item in remat.tensors.split(",")) + every


def command(plan: Plan) -> str:
    """Return the command line that reproduces this plan."""
    overrides = [o if o.startswith("--") else f"--config.{o}" for o in plan.overrides]
    # A chip without a description in specs/ is that of the machine on which the plan was made, so --topology is left out.
    machine = [f"--topology={plan.topology}"] if plan.topology.partition(":")[0] in CHIPS else []
    load = plan.experts.load if plan.experts else 1
    busiest = [f"--experts-load={expert_load(load)}"] if load != 1 else []
    arguments = shlex.join([f"--config={plan.config}", *overrides, *machine, *busiest])
    return f"{to_run_sh('python -m jaxtrain plan')} {arguments}"


# ---- memory


def memory_classes(plan: Plan) -> list[tuple[str, float, str]]:
    """Return (name, GiB, CSS colour) at the peak, largest class first. Two or more classes below SMALL share one entry.

    Temporaries have an entry for each of their largest parts, in shades of one colour.
    """
    memory = plan.memory
    ordered = sorted(memory.by_class.items(), key=lambda item: -item[1])
    small = [value for _, value in ordered if value < SMALL * memory.peak_gib]
    shown = ordered[: -len(small)] if len(small) > 1 else ordered
    rows = []
    for name, value in shown:
        temporaries = _temporaries(plan) if name == "temporaries" else []
        rows += temporaries or [(name, value, CLASS_COLOURS.get(name, OTHER_CLASS))]
    return [*rows, (f"{len(small)} others", math.fsum(small), OTHER_CLASS)] if len(small) > 1 else rows


def _temporaries(plan: Plan) -> list[tuple[str, float, str]]:
    """Return the rows of the temporaries: their largest parts, and the sum of all others."""
    memory = plan.memory
    temporaries = sorted(memory.temporaries.items(), key=lambda item: -item[1])
    large = [(name, gib) for name, gib in temporaries if gib >= SMALL * memory.peak_gib][:TEMPORARIES]
    small = temporaries[len(large) :]
    rows = [*large, ("others", math.fsum(gib for _, gib in small))] if small else large
    colour, full = CLASS_COLOURS["temporaries"], 100
    shades = [f"color-mix(in srgb, {colour} {max(20, full - 20 * n)}%, var(--ground))" for n in range(len(rows))]
    return [(f"temporaries: {name}", gib, shade) for (name, gib), shade in zip(rows, shades, strict=True)]


def memory_section(plan: Plan) -> Section:
    """Return the section of memory at the peak by class."""
    memory = plan.memory
    names, values, colours = zip(*memory_classes(plan), strict=True)
    classes = Column("class", names, total="peak", colours=colours)
    sizes = dataclasses.replace(_sizes(values), total=gib([*values, memory.peak_gib])[1][-1])
    bar = _stacked_bar(
        "Memory at the peak", classes, sizes, max(memory.hbm_gib, memory.peak_gib + memory.reserve_gib), memory.usable_gib
    )
    columns = [classes, sizes, shares("share", values, memory.peak_gib), bars(values, memory.peak_gib)]
    by_class = Table(f"Peak memory by class, {sizes.heading} on each GPU", columns, style="sortable")
    unit, (arguments, temporary, gaps) = gib([memory.arguments_gib, memory.temp_gib, memory.taken_gib - memory.peak_gib])
    sums = f"state and batch {arguments} {unit} throughout, other memory {temporary} {unit} with {gaps} {unit} fragmentation"
    notes = ["temporaries are named after the pass and part whose operation wrote them"] if memory.temporaries else []
    return Section("Memory at the peak", [bar, by_class, "; ".join([sums, *notes])])


def memory_details(plan: Plan) -> Section:
    """Return the section with the sources of the memory figures, and saved activations by name."""
    memory = plan.memory
    blocks: list[str | Table] = [f"the peak is in {op_label(memory.peak_at)}"] if memory.peak_at else []
    if memory.workspace_gib:
        blocks.append(f"cuDNN workspace {size(memory.workspace_gib)}, by {memory.workspace_by.replace('cudnn', 'cuDNN')}")
    unit, (card, reserve, usable) = gib([memory.hbm_gib, memory.reserve_gib, memory.usable_gib])
    blocks.append(f"the card has {card} {unit}: {usable} usable, {reserve} reserved for NCCL and the CUDA context")
    if memory.host_gib:
        blocks.append(f"pinned host memory for each GPU: {size(memory.host_gib)}")
    if memory.saved:
        saved = sorted(memory.saved.items(), key=lambda item: -item[1])
        values = [value for _, value in saved]
        title = f"Saved activations, {gib([math.fsum(values)])[0]} on each GPU"
        names = Column("activation", [name for name, _ in saved], total="all")
        blocks.append(Table(title, [names, _sizes(values), bars(values, values[0])]))
    return Section("Memory in detail", blocks)


def _stacked_bar(title: str, names: Column, sizes: Column, total: float, mark: float | None = None) -> Drawing:
    """Return one stacked bar of a table's rows. total: GiB of the bar's full length."""
    tips = [f"{name}: {text} {sizes.heading}" for name, text in zip(names.cells, sizes.cells, strict=True)]
    label = f"{title}: {', '.join(tips)}" + (f"; {size(mark)} usable" if mark is not None else "")
    segments = list(zip(tips, sizes.values or (), names.colours, strict=True))
    return Drawing(stacked_bar(label, segments, total, None if mark is None else (mark, f"usable {size(mark)}")))


def _sizes(values: Sequence[float], *, total: bool = True) -> Column:
    """Return a column of values (GiB), in MiB if all are below 1 GiB."""
    unit = gib([*values, *([math.fsum(values)] if total else [])])[0]
    return numbers(unit, values, lambda vs: column([v * (1024 if unit == "MiB" else 1) for v in vs]), total=total)


def arrays_section(plan: Plan) -> Section:
    """Return the section of the largest arrays at the peak, for the page."""
    arrays = plan.memory.largest
    if not arrays:
        return Section("Largest arrays at the peak", [])
    columns = [
        Column("array", [b.shape for b in arrays], kind="whole"),
        _sizes([b.gib for b in arrays], total=False),
        Column("class", [b.kind for b in arrays]),
        Column("source", [b.source for b in arrays], kind="source"),
        Column("scope, and name in the HLO", [_scope(b.op_name, b.instruction) for b in arrays], kind="scope", page_only=True),
    ]
    return Section("Largest arrays at the peak", [Table("", columns, page_rows=PAGE_ROWS, style="sortable")])


def _scope(op_name: str, instruction: str) -> str:
    """Return the named scopes of an instruction, a line feed, and its name in the HLO. Arguments have jaxtrain's dotted names.

    XLA combines instructions and joins their paths as "prefix/(one:two)". Each of these paths is shortened, and shown once.
    """
    if op_name.startswith(("state.", "batch[")):
        return f"{argument(op_name)}\n{instruction}"
    paths = op_name.removeprefix("jit(train_step)/").split(":")
    return f"{'; '.join(dict.fromkeys(filter(None, map(op_label, paths))))}\n{instruction}"


def argument(op_name: str) -> str:
    """Return the dotted name of an argument: layers.mlp.gate for state.optimizer[0].mu['layers']['mlp']['gate']."""
    _, bracket, keys = op_name.partition("['")
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", bracket + keys).lstrip(".") or op_name


# ---- communication


def merged_collectives(plan: Plan) -> list[Collective]:
    """Return collectives merged by kind, dtype, axis, group size and source line, longest first.

    The merged collective has the instruction and the scope of the longest.
    """
    groups: dict[tuple[str, str, str, int, str], list[Collective]] = {}
    for c in sorted(plan.collectives, key=lambda c: -c.ms):
        groups.setdefault((c.kind, c.dtype, c.axis, c.group, c.source), []).append(c)
    summed = ("count", "wire_gib", "network_gib", "ms", "exposed_ms")
    merged = [dataclasses.replace(g[0], **{f: sum(getattr(c, f) for c in g) for f in summed}) for g in groups.values()]
    return sorted(merged, key=lambda c: (-c.ms, -c.wire_gib))


def collectives_section(plan: Plan) -> Section:
    """Return the section of the collectives of a step, with bytes on the wire, time and exposed time."""
    collectives = merged_collectives(plan)
    if not collectives:
        return Section("Collectives", ["none: the GPUs do not communicate"])
    network = [c.network_gib * GB_PER_GIB for c in collectives]
    columns = [
        Column("kind", [c.kind for c in collectives], kind="whole", total="all"),
        Column("dtype", [c.dtype for c in collectives]),
        Column("axis", [c.axis for c in collectives]),
        labels("GPUs", [c.group for c in collectives]),
        counts("count", [c.count for c in collectives]),
        numbers("wire GB", [c.wire_gib * GB_PER_GIB for c in collectives]),
        *([numbers("network GB", network)] if any(network) else []),
        numbers("ms", [c.ms for c in collectives]),
        numbers("exposed ms", [c.exposed_ms for c in collectives]),
        Column("source", [c.source for c in collectives], kind="source"),
        Column(
            "scope, and name in the HLO", [_scope(c.op_name, c.instruction) for c in collectives], kind="scope", page_only=True
        ),
    ]
    table = Table("Collectives of a step; bytes sent by each GPU", columns, ROWS, style="sortable")
    on_links, exposed = column([plan.time.communication_ms, plan.time.exposed_ms])
    return Section("Collectives", [table, f"communication {on_links} ms, {exposed} ms of it exposed"])


# ---- time


def step_parts(plan: Plan) -> list[tuple[str, float]]:
    """Return (part, ms) of a step. The sum is the step time."""
    time = plan.time
    parts = [
        ("GEMM", time.gemm_ms),
        ("attention", time.attention_ms),
        ("memory-bound", time.memory_ms),
        ("exposed communication", time.exposed_ms),
    ]
    return [*parts, ("host", time.host_exposed_ms)] if time.host_exposed_ms else parts


def time_section(plan: Plan, steps: int | None, tokens: int = 0, epochs: str = "") -> Section:
    """Return the section of the roofline of a step, and the time to train. The arguments are those of `summary`."""
    time = plan.time
    names, values = zip(*step_parts(plan), strict=True)
    kinds = Column("part", names, total="step", colours=[PART_COLOURS[name] for name in names])
    times = dataclasses.replace(numbers("ms", values), total=column([*values, time.step_ms])[-1])
    bar = _stacked_bar("Time of a step", kinds, times, max(time.step_ms, sum(values)))
    table = Table(
        "Roofline of a step on each GPU", [kinds, times, shares("share", values, time.step_ms), bars(values, time.step_ms)]
    )
    blocks: list[str | Table | Drawing] = [
        bar,
        table,
        f"roofline: {plan.tokens_per_step:,} tokens a step, {rough(time.tokens_per_s, 4)} tokens/s in all; MFU "
        f"{percent(time.mfu_full)} full; HFU {percent(time.hfu)}",
    ]
    blocks += filter(None, (matmuls(plan), host_waits(plan)))
    return Section("Time of a step", [*blocks, training_table(plan, steps, tokens, epochs)])


def training_table(plan: Plan, steps: int | None, tokens: int = 0, epochs: str = "") -> Table:
    """Return the table of the time to train, for `steps` and for a trillion tokens, without saves, evaluations and restarts."""
    works = []
    if steps:
        title = ", ".join(filter(None, ("this config", epochs)))
        works.append((title, float(tokens or steps * plan.tokens_per_step), f"{steps:,}"))
    works.append(("each trillion", TRILLION, rough(TRILLION / plan.tokens_per_step)))
    step_times = plan.time.expected_step_ms or (plan.time.step_ms,)
    rows = []
    for name, all_tokens, count in works:
        seconds = [all_tokens / plan.tokens_per_step * ms / 1e3 for ms in step_times]
        hours = [each / 3600 * device_count(plan) for each in seconds]
        rows.append((name, short_count(all_tokens), count, duration(*seconds), " to ".join(map(rough_hours, hours))))
    kinds = ("", "number", "number", "number", "number")
    headings = ("", "tokens", "steps", "time", "GPU-hours")
    cells = list(zip(*rows, strict=True))
    source = "expected" if plan.time.expected_step_ms else "by the roofline"
    return Table(
        f"Time to train on {plural(device_count(plan), 'GPU')}, {source}",
        [Column(heading, texts, kind=kind) for heading, texts, kind in zip(headings, cells, kinds, strict=True)],
    )


def rough_hours(hours: float) -> str:
    """Return GPU-hours to three digits, but no digit below a hundredth."""
    return rough(hours) if hours >= 1 else number(hours, 2)


def host_waits(plan: Plan) -> str:
    """Return the number of times per step that the host waits for loops and branches, and their names; "" without waits."""
    if not plan.host_waits:
        return ""
    by_count = sorted(plan.host_waits.items(), key=lambda item: -item[1])
    loops = [f"{n:,} x {name}" for name, n in by_count[:SHOWN]] + [f"{len(by_count) - SHOWN} more"] * (len(by_count) > SHOWN)
    waits = plural(sum(plan.host_waits.values()), "time")
    return f"not counted: the host waits {waits} a step for a loop's end or a branch on the GPU: {', '.join(loops)}"


def matmuls(plan: Plan) -> str:
    """Return a layer's number of matmuls and of FP8 matmuls, and the peak to which MFU and HFU relate; "" without FP8."""
    if not (m := plan.matmuls):
        return ""
    wide = f"; in bf16: {m.some_wide}" if m.wide else ""
    return f"matmuls in FP8: {m.eight:g} of {m.products:g} a layer{wide}. MFU and HFU are of the bf16 peak unless named"


def kernels_section(plan: Plan) -> Section:
    """Return the section of the kernels of a step by time, without collectives."""
    kernels = sorted((k for k in plan.kernels if k.kind != "communication"), key=lambda k: -k.ms)
    if not kernels:
        return Section("Kernels", [])
    columns = [
        Column("kind", [k.kind for k in kernels]),
        counts("count", [k.count for k in kernels], total=False),
        numbers("ms", [k.ms for k in kernels], total=False),
        shares("of step", [k.ms for k in kernels], plan.time.step_ms),
        numbers("TFLOP", [k.tflop for k in kernels], total=False),
        numbers("GB", [k.gb for k in kernels], total=False),
        Column("operation", [k.op_name for k in kernels], kind="path"),
        Column("source", [k.source for k in kernels], kind="source"),
    ]
    return Section("Kernels", [Table("Kernels of a step on each GPU", columns, page_rows=PAGE_ROWS, style="sortable")])


def loops_section(plan: Plan) -> Section:
    """Return the section of the program's loops and their iterations. All other figures count every iteration."""
    loops = sorted(plan.trip_counts.items(), key=lambda item: -item[1])
    if not loops:
        return Section("Loops", [])
    columns = [
        Column("loop", [name for name, _ in loops], kind="path"),
        labels("iterations", [n for _, n in loops]),
    ]
    return Section("Loops", [Table("Loops of the program; all other figures are multiplied out", columns)])


# ---- pipeline and experts


def pipeline(plan: Plan) -> list[str]:
    """Return the pipeline's schedule in words; [] without stages."""
    if not (pipe := plan.pipeline):
        return []
    virtual = f", {pipe.groups} virtual stages each" if pipe.groups > 1 else ""
    neighbours, everyone, over_network = column([v * GB_PER_GIB for v in (pipe.permute_gib, pipe.reduce_gib, pipe.network_gib)])
    network = f", {over_network} GB of it over the network" if pipe.network_gib else ""
    on_links, exposed = column([pipe.ms, pipe.exposed_ms])
    return [
        f"{pipe.schedule} over {pipe.stages} stages{virtual}, {pipe.microbatches} microbatches; "
        f"layers {' | '.join(pipe.layers)}",
        f"bubble {percent(pipe.bubble)} of the step by formula, (stages - 1) / (virtual stages x microbatches + stages - 1); "
        f"{percent(pipe.idle)} of the program's passes through a stage are idle",
        f"at most {pipe.in_flight:g} microbatches in flight on a stage: {size(pipe.saved_gib)} of saved activations on "
        f"each GPU",
        f"over stage each GPU sends {neighbours} GB to its neighbours and {everyone} GB to all stages{network}: {on_links} ms, "
        f"{exposed} ms of it exposed",
    ]


def experts(plan: Plan) -> list[str]:
    """Return the placement of experts and the dispatch of tokens in words; [] for a model without experts."""
    if not (x := plan.experts):
        return []
    placement = f"{x.experts // x.devices} on each of {x.devices} GPUs" if x.devices > 1 else "all on each GPU"
    lines = [
        f"{x.experts} experts a layer, {placement}, {x.per_token} for each token: {x.rows:,.0f} rows of a microbatch and layer "
        f"on a GPU, in buffers of {x.room:,.0f}"
    ]
    if x.devices > 1:
        lines.append(
            f"all-to-all of a layer and microbatch, forward and backward: {number(x.layer_gib * GB_PER_GIB)} GB from each GPU, "
            f"{number(x.layer_exposed_ms)} ms of it exposed; {number(x.exposed_ms)} ms exposed in the step"
        )
    if x.capacity:
        lines.append(f"capacity factor {x.capacity:g}: the whole capacity is computed, and tokens beyond it are dropped")
    else:
        load = expert_load(x.load)
        rounds = f"each dispatch takes {plural(x.rounds, 'round')}" if x.devices > 1 else "any load has the same rows"
        lines.append(f"expert load {load}: the busiest expert has {load} times its even share; {rounds}")
    return lines


# ---- sources of the figures


def rates(plan: Plan) -> str:
    """Return the rates that the estimated times of this program use, and their source."""
    gpu_rates = plan.rates
    pallas = plan.attention == "pallas"
    cudnn_shares = PALLAS_ATTENTION if pallas else (1.0, 1.0)
    fp8 = any("jaxtrain_attention_forward_fp8" in kernel.op_name for kernel in plan.kernels)
    if fp8:
        cudnn_shares = PALLAS_ATTENTION[0] * fp8_attention(ATTENTION_AT), cudnn_shares[1]
    stated = gpu_rates.attention_forward_tflops, gpu_rates.attention_backward_tflops
    forward, backward = (number(x * y, 0) for x, y in zip(cudnn_shares, stated, strict=True))
    small = ((mib, gpu_rates.nvlink_gb_s * rate_fraction(gpu_rates.collective_curve, mib * 2**20)) for mib in (64, 1))
    by_size = " and ".join(f"{number(gb_s)} at {mib} MiB" for mib, gb_s in small)
    texts = [
        f"GEMM {number(gpu_rates.gemm_tflops, 0)} TFLOP/s"
        + (f", in FP8 {number(gpu_rates.fp8_tflops, 0)}" if plan.matmuls else ""),
        f"{'Pallas ' if pallas else ''}attention {forward} forward{' in FP8' * fp8}, {backward} backward "
        f"at {ATTENTION_AT:,} tokens",
        f"memory {number(gpu_rates.memory_tb_s)} TB/s",
        f"NVLink {number(gpu_rates.nvlink_gb_s, 0)} GB/s for large messages, {by_size}",
    ]
    if any(c.network_gib for c in plan.collectives):
        texts.append(
            f"network {number(gpu_rates.network_gb_s, 0)} GB/s + {number(gpu_rates.network_latency_us, 0)} us between nodes"
        )
    if plan.memory.host_gib:
        texts.append(f"host {number(gpu_rates.host_gb_s, 0)} GB/s")
    return f"{gpu_rates.source}: {', '.join(texts)}"


def work(plan: Plan) -> str:
    """Return the FLOPs per token by formula and per step in the program, and the balance of attention over mesh.seq."""
    flops = plan.flops
    excess = flops.hardware_per_step / flops.expected_per_step - 1 if flops.expected_per_step else math.nan
    against = f"{100 * excess:+.1f}%" if math.isfinite(excess) else "-"
    text = (
        f"{number(flops.per_token_causal / 1e9, 2)} GFLOP a token causal, {number(flops.per_token_full / 1e9, 2)} full; a step "
        f"executes {number(flops.hardware_per_step / 1e12)} TFLOP on each GPU, {against} against the formula with recomputation"
    )
    if ranks := flops.attention_by_rank:
        apart = 100 * (max(ranks) / min(ranks) - 1)
        text += f"; attention within the causal mask: {number(max(ranks) / 1e12)} TFLOP on each of {len(ranks)} ranks of seq"
        text += f" (largest over smallest {apart:+.1f}%)"
        text += f", {number(flops.attention_per_step / 1e12)} computed" if flops.attention_per_step else ""
    return text


def compiler(plan: Plan) -> str:
    """Return compiler versions, options and compile time."""
    versions = ", ".join(f"{name} {v}" for name, v in plan.versions.items())
    options = " ".join(f"{name}={v}" for name, v in plan.options.items()) or "none"
    return f"compiled in {duration(plan.compile_s)} by {versions}; compiler options: {options}"
