"""The step time that a plan predicts: small programs whose times are added up by hand, at the round rates of hlo_text.py."""

import dataclasses
import json
import re

import pytest
from hlo_text import BIG, ELEMENTS, GATHER, RATES, gemm, moves, read

from jaxtrain.plan import rates, result
from jaxtrain.plan.program import op_cost, roofline
from jaxtrain.plan.program.hlo import HloError
from jaxtrain.plan.rates import PALLAS_ATTENTION, PALLAS_FRACTION


def predict(entry: str, wires=None, before: str = "") -> roofline.Roofline:
    found = roofline.predict(read(entry, before), RATES, wires or {})
    parts = found.gemm_ms + found.attention_ms + found.memory_ms + found.exposed_ms + found.host_exposed_ms
    assert found.step_ms == pytest.approx(parts)
    return found


def one(lines: str, before: str = "") -> result.KernelSummary:
    (kernel,) = predict(lines, before=before).kernels
    return kernel


# ---- Kernels


def test_gemm_and_memory_bound():
    """Of the memory-bound kernel's 0.2 ms, one half reads 100 MB and one half writes them."""
    found = predict(gemm("g") + f"\n  ROOT %m = {BIG} fusion(%x), kind=kLoop, calls=%twice")
    assert (found.gemm_ms, found.memory_ms, found.step_ms) == pytest.approx((1.0, 0.2, 1.2))
    assert found.flops == 1e11 and found.bound_by.startswith("matmuls 83%")


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul$f8"])
def test_cublas_call(target):
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
    line = "%g = (bf16[1000,10000]{1,0}, s8[4194304]{0}) custom-call(%a.1, %b.1)"
    found = predict(f'\n  ROOT {line}, custom_call_target="{target}", backend_config={json.dumps(config)}')
    (kernel,) = found.kernels
    ms = 0.5 if target.endswith("f8") else 1.0
    assert found.gemm_least_ms == pytest.approx(ms)  # at the rate of its own type
    assert (kernel.kind, kernel.tflop, kernel.ms) == ("gemm", pytest.approx(0.1), pytest.approx(ms))
    assert kernel.gb == pytest.approx(0.13)  # without the workspace


def attention(call: str, ids: int = 0) -> roofline.Roofline:
    """Return the roofline of an attention call (its target and options) at 50 (forward) or 25 MFLOP/s (backward).

    It has 2 sequences of 64 tokens, and 4 query heads of 8 with 2 key/value heads.
    """
    q, kv = "bf16[2,64,4,8]{3,2,1,0}", "bf16[2,64,2,8]{3,2,1,0}"
    types = {**{f"i{n}": "s32[2,64]{1,0}" for n in range(ids)}, "q": q, "k": kv, "v": kv}
    arguments = "".join(f"\n  %{name} = {type} parameter({n + 3})" for n, (name, type) in enumerate(types.items()))
    made = q if ids else f"({q}, f32[2,4,64]{{2,1,0}}, u8[0]{{0}})"
    slow = dataclasses.replace(RATES, attention_forward_tflops=50e-6, attention_backward_tflops=25e-6)
    operands = ", ".join(f"%{name}" for name in types)
    module = read(f"{arguments}\n  ROOT %o = {made} custom-call({operands}), custom_call_target={call}")
    return roofline.predict(module, slow, {})


@pytest.mark.parametrize(
    ("mask", "window", "name", "pairs"),
    [
        ("NO_MASK", 0, "all", 64 * 64),
        ("PADDING_CAUSAL", 0, "causal", 64 * 32),
        ("CAUSAL", 16, "window16", 64 * (16 - 2)),
    ],
)
def test_attention_calls(mask, window, name, pairs):
    """A forward call counts 4 x 8 FLOPs for each pair inside the mask, for every head.

    The names of Pallas kernels contain the mask and the window. Their backward pass has two kernels, with seven matmuls
    together. Pallas kernels run at the fraction PALLAS_ATTENTION of the attention rate.
    """
    config = json.dumps({"cudnn_fmha_backend_config": {"mask_type": mask, "sliding_window_length": window}})
    forward = 2 * 4 * pairs * 4 * 8
    calls = [
        (f'"__cudnn$fmhaSoftmax{t}", backend_config={config}', 0, f, bool(t), 1.0) for t, f in (("", 1), ("Backward", 2.5))
    ]
    for kernel, factor in (("forward", 1.0), ("backward_q", 2.5 * 3 / 7), ("backward_kv", 2.5 * 4 / 7)):
        named = f'metadata={{op_name="jit(step)/layers/jaxtrain_attention_{kernel}_{name}/mpmd_map"}}'
        call = f'"mosaic_gpu_v2", {named}, backend_config={{kernel_hash = "{{", module = "ML\\EFR{{"}}'
        calls.append((call, 3, factor, kernel != "forward", PALLAS_ATTENTION[kernel != "forward"]))
    for call, ids, factor, backward, share in calls:
        found = attention(call, ids)
        assert found.flops == pytest.approx(forward * factor), call
        # the rate is for 8,192 keys, and this call has 64
        rate = (25.0 if backward else 50.0) * share * rates.length_factor(64, backward)
        assert found.attention_ms == pytest.approx(found.flops / rate / 1e3), call


def test_experts_call():
    """1,000 rows of 5,000 elements are multiplied by weights of (5,000, 10,000), one an expert. Empty rows, half of them, cost
    nothing.
    """
    arguments = "\n  %g = s32[4]{0} parameter(3)\n  %w = bf16[4,5000,10000]{2,1,0} parameter(4)"
    named = 'metadata={op_name="jit(step)/layers/jaxtrain_experts_times_D/mpmd_map"}'
    call = f'custom-call(%g, %g, %a.1, %w), custom_call_target="mosaic_gpu_v2", {named}'
    module = read(f"{arguments}\n  ROOT %o = bf16[1000,10000]{{1,0}} {call}")
    found = roofline.predict(module, RATES, {}, filled=0.5)
    assert found.flops == pytest.approx(0.05e12)
    assert found.gemm_ms == found.gemm_least_ms == pytest.approx(0.5 / PALLAS_FRACTION)


def test_pairs_of_queries_and_keys():
    """A causal mask leaves each query half of the keys on average, even if the call has a part of the queries. Of 64 keys, a
    window of 8 leaves each query 8 - 8^2 / 128 on average.
    """
    found = [op_cost.attention_pairs(*call, 16, 64) for call in (("CAUSAL", 0), ("CAUSAL", 8), ("NO_MASK", 0))]
    assert found == [16 * 32, 16 * 7.5, 1024]


def test_a_scatter_reads_what_it_adds_to():
    """2 rows of 10 MB each are added to 2 of 40 rows. The added rows are read, and the 2 of 40 are read and written."""
    before = """
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}
"""
    table, rows = "f32[40,2500000]{1,0}", "f32[2,2500000]{1,0}"
    arguments = f"\n  %table = {table} parameter(3)\n  %at = s32[2]{{0}} parameter(4)\n  %rows = {rows} parameter(5)"
    kernel = one(f"{arguments}\n  ROOT %f = {table} scatter(%table, %at, %rows), to_apply=%add", before)
    assert kernel.gb == pytest.approx(3 * 0.020, rel=1e-5)


def test_slice_of_a_stacked_weight_counts_as_the_slice():
    """One of 40 layers of 10 MB is read, converted to bfloat16 and written."""
    stack = "f32[40,2500000]{1,0}"
    before = f"""
%layer (w: f32[40,2500000], n: s32[]) -> bf16[2500000] {{
  %w = {stack} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %c = bf16[40,2500000]{{1,0}} convert(%w)
  %s = bf16[1,2500000]{{1,0}} dynamic-slice(%c, %n, %zero), dynamic_slice_sizes={{1,2500000}}
  ROOT %r = bf16[2500000]{{0}} bitcast(%s)
}}
"""
    arguments = f"\n  %stack = {stack} parameter(3)\n  %number = s32[] parameter(4)"
    fused = one(f"{arguments}\n  ROOT %f = bf16[2500000]{{0}} fusion(%stack, %number), kind=kLoop, calls=%layer", before)
    assert fused.gb == pytest.approx(0.010 + 0.005, rel=1e-5)


def test_update_in_place_counts_as_the_update():
    stack = "f32[40,2500000]{1,0}"
    before = f"""
%put (w: f32[40,2500000], u: bf16[2500000], n: s32[]) -> f32[40,2500000] {{
  %w = {stack} parameter(0)
  %u = bf16[2500000]{{0}} parameter(1)
  %n = s32[] parameter(2)
  %zero = s32[] constant(0)
  %c = f32[2500000]{{0}} convert(%u)
  %r = f32[1,2500000]{{1,0}} bitcast(%c)
  ROOT %p = {stack} dynamic-update-slice(%w, %r, %n, %zero)
}}
"""
    arguments = f"\n  %stack = {stack} parameter(3)\n  %new = bf16[2500000]{{0}} parameter(4)\n  %number = s32[] parameter(5)"
    call = f"{stack} fusion(%stack, %new, %number), kind=kLoop, calls=%put"
    assert one(f"{arguments}\n  ROOT %f = {call}", before).gb == pytest.approx(0.005 + 0.010, rel=1e-5)
    elsewhere = before.replace("dynamic-update-slice(%w,", "dynamic-update-slice(%e,")
    elsewhere = elsewhere.replace("  ROOT %p", f"  %e = {stack} exponential(%w)\n  ROOT %p")
    # An update of what the fusion makes writes all of it.
    assert one(f"{arguments}\n  ROOT %f = {call}", elsewhere).gb == pytest.approx(0.005 + 0.390 + 0.400, rel=1e-5)


# ---- The schedule


def test_collective_fully_hidden():
    lines = f"\n  %ag = {GATHER}{gemm('g')}{gemm('h')}\n  ROOT %done = {BIG} all-gather-done(%ag)"
    found = predict(lines, moves("ag"))
    assert (found.step_ms, found.communication_ms, found.exposed_ms) == pytest.approx((2.0, 1.01, 0.0))


def test_collective_partly_exposed_and_the_next_one_waits_for_the_link():
    """The second gather is issued at 0 ms, but runs from 1.01 to 2.02. From 1.01 ms on, compute waits for the second gather."""
    second = f"\n  %ag.2 = {GATHER}"
    lines = (
        f"\n  %ag = {GATHER}{second}{gemm('g')}\n  %d = {BIG} all-gather-done(%ag)\n  ROOT %d.2 = {BIG} all-gather-done(%ag.2)"
    )
    found = predict(lines, moves("ag") | moves("ag.2"))
    assert found.step_ms == pytest.approx(2.02)
    assert {c.instruction: c.exposed_ms for c in found.collectives} == pytest.approx({"ag": 0.01, "ag.2": 1.01})
    assert found.bound_by.startswith("exposed communication 50%")


def test_network_where_it_is_slower():
    lines = f"\n  ROOT %ag = {BIG} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"
    assert predict(lines, moves("ag", network=50.0, hops=1)).step_ms == pytest.approx(5.1)
    assert predict(lines, moves("ag", network=1.0, hops=1)).step_ms == pytest.approx(1.11)  # NVLink takes 1.01 ms of them
    assert predict(lines, moves("ag", network=50.0, hops=127)).step_ms == pytest.approx(5 + 12.7)


def test_nested_loops():
    """Each of 3 iterations runs a loop of 4 iterations, and then one more GEMM. An inner iteration overlaps an all-gather of
    1.01 ms with a GEMM of 1 ms, so each all-gather exposes 0.01 ms.
    """
    state = "(s32[], bf16[1000,5000]{1,0}, bf16[5000,10000]{1,0}, " + BIG + ")"

    def body(name: str, mark: int, lines: str) -> str:
        """Return a computation from the state to the state; `mark` is added to the names of its instructions."""
        text = f"""
  %t = {state} parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %a.1 = bf16[1000,5000]{{1,0}} get-tuple-element(%t), index=1
  %b.1 = bf16[5000,10000]{{1,0}} get-tuple-element(%t), index=2
  %x = {BIG} get-tuple-element(%t), index=3{lines}
  ROOT %out = {state} tuple(%n, %a.1, %b.1, %x)"""
        text = re.sub(r"%(t|n|a.1|b.1|x|g|ag|d|out)\b", rf"%\1.{mark}", text)
        return f"\n%{name} (s: s32[]) -> s32[] {{{text}\n}}\n"

    def loop(name: str, of: str, trips: int) -> str:
        config = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
        return f"\n  {name} = {state} while(%t), condition=%never, body=%{of}, backend_config={config}"

    never = f"\n%never (t: s32[]) -> pred[] {{\n  %t.0 = {state} parameter(0)\n  ROOT %false = pred[] constant(false)\n}}\n"
    inner = body("inner", 1, f"\n  %ag = {GATHER}{gemm('g')}\n  %d = {BIG} all-gather-done(%ag)")
    before = never + inner + body("outer", 2, loop("%w", "inner", 4) + gemm("g"))
    start = f"\n  %n = s32[] constant(0)\n  %t = {state} tuple(%n, %a.1, %b.1, %x)"
    often = {name: dataclasses.replace(f, count=12) for name, f in moves("ag.1").items()}
    found = predict(start + loop("ROOT %v", "outer", 3), often, before)
    assert found.step_ms == pytest.approx(3 * (4 * 1.01 + 1.0))
    (gather,) = found.collectives
    assert (gather.wire_gib, gather.ms, gather.exposed_ms) == pytest.approx((12 * 1e8 / 2**30, 12.12, 0.12))
    assert found.flops == 15e11 and found.kernels[0].count == 15


def test_branches_of_kinds_of_layers_count_by_their_shares():
    """A branch counts by the share of layers that take it. Here 75% of layers take the window branch, which costs nothing."""
    before = f"""
%window (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  ROOT %p.1 = {BIG} parameter(0)
}}

%full (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p.2 = {BIG} parameter(0)
  ROOT %n = {BIG} negate(%p.2)
}}
"""
    scope = 'metadata={op_name="jit(train_step)/jvp(layers)/while/body/attention/attention_kind/cond"}'
    choice = f"conditional(%i, %x, %x), branch_computations={{%window, %full}}, {scope}"
    module = read(f"\n  %i = s32[] constant(0)\n  ROOT %c = {BIG} {choice}", before)
    found = roofline.predict(dataclasses.replace(module, kind_shares=(0.75, 0.25)), RATES, {})
    assert (found.step_ms, found.memory_ms) == pytest.approx((0.05, 0.05))
    assert roofline.predict(module, RATES, {}).step_ms == pytest.approx(0.2)  # without shares the slowest branch


def test_copies_to_the_host_run_beside_compute():
    host = f"f32[{ELEMENTS}]{{0:S(5)}}"
    start = f"\n  %cs = ({host}, {BIG}, u32[]) copy-start(%x)"
    found = predict(start + gemm("g") + f"\n  ROOT %cd = {host} copy-done(%cs)")
    assert found.host_exposed_ms == pytest.approx(4.0)  # 100 MB at 20 GB/s, a GEMM of 1 ms beside it
    assert found.kernels[0].kind == "host" and found.communication_ms == 0
    here = start.replace(":S(5)", "") + gemm("g") + f"\n  ROOT %cd = {BIG} copy-done(%cs)"
    assert predict(here).step_ms == pytest.approx(1.0)  # a copy inside the device hides behind the GEMM


# ---- Refusals


STRANGE = f"\n%strange (p: f32[1]) -> f32[1] {{\n  %p.1 = {BIG} parameter(0)\n  ROOT %fft = {BIG} fft(%p.1)\n}}\n"
F8 = json.dumps({"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}})


@pytest.mark.parametrize(
    "lines",
    [
        f"\n  ROOT %odd = {BIG} convolution(%x, %x), window={{size=1}}",
        # A custom call of another library: it counts as neither attention nor experts.
        f'\n  ROOT %odd = {BIG} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="jit(step)/theirs"}}',
        f"\n  ROOT %odd = ({BIG}, {BIG}) all-gather-start(%x), dimensions={{0}}",
        f"\n  ROOT %odd = {BIG} fusion(%x), kind=kLoop, calls=%strange",
        "\n  ROOT %odd = (bf16[1000,10000]{1,0}, s8[4]{0}) custom-call(%a.1, %b.1), "
        f'custom_call_target="__cublas$lt$matmul$f8", backend_config={F8}',
    ],
)
def test_what_is_not_understood_is_refused(lines):
    wires = moves("odd") if "all-gather" in lines else {}
    with pytest.raises(HloError, match="odd|round figures"):
        roofline.predict(read(lines, STRANGE), dataclasses.replace(RATES, fp8_tflops=0.0), wires)
