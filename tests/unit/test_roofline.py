"""The step time that a plan predicts: small programs whose times are added up by hand, and FLOPs of real compiles by formula.

The rates are round: 100 TFLOP/s, 1 TB/s of memory, 100 GB/s on NVLink of which every message reaches 1 / 1.01, 10 GB/s on the
network with 100 us from node to node, 20 GB/s to the host. So 100 MB of memory traffic take 0.1 ms, 100 MB on NVLink 1.01 ms.
"""

import dataclasses
import json

import pytest
from helpers import few, program, tiny, train_step

from jaxtrain import hardware, launch
from jaxtrain.plan import rates, result, topology
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import collectives, hlo, roofline
from jaxtrain.plan.program.hlo import HloError
from jaxtrain.plan.program.work import Work
from jaxtrain.plan.rates import PALLAS_FRACTION

FULL = ((1.0, 1 / 1.01),)
RATES = result.Rates(100.0, 50.0, 25.0, 1.0, 100.0, 10.0, 20.0, 100.0, "round figures", 200.0, FULL)

ELEMENTS = 25_000_000  # of float32: 100 MB
BIG = f"f32[{ELEMENTS}]{{0}}"
COMPUTATIONS = f"""
%twice (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p = {BIG} parameter(0)
  ROOT %t = {BIG} add(%p, %p)
}}

%matmul (a: bf16[1000,5000], b: bf16[5000,10000]) -> bf16[1000,10000] {{
  %a = bf16[1000,5000]{{1,0}} parameter(0)
  %b = bf16[5000,10000]{{1,0}} parameter(1)
  ROOT %d = bf16[1000,10000]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
ARGUMENTS = f"""
  %x = {BIG} parameter(0)
  %a.1 = bf16[1000,5000]{{1,0}} parameter(1)
  %b.1 = bf16[5000,10000]{{1,0}} parameter(2)"""
GATHER = f"(({BIG}), {BIG}) all-gather-start(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"


def read(entry: str, before: str = "") -> hlo.Module:
    """A module from the lines of its entry, which may use x (100 MB), a.1 and b.1 (a GEMM of 1 ms), `twice` and `matmul`."""
    computations = f"{COMPUTATIONS}{before}\nENTRY %main (x: f32[1]) -> f32[1] {{{ARGUMENTS}{entry}\n}}\n"
    return hlo.parse(f"HloModule small, is_scheduled=true\n{computations}")


def moves(name: str, megabytes: float = 100.0, network: float = 0.0, hops: int = 0) -> dict[str, collectives.Found]:
    """What the collective sends, in millions of bytes."""
    return {name: collectives.Found("all-gather", "f32", "fsdp", 2, 1, megabytes * 1e6, network * 1e6, "", "", name, (), hops)}


def gemm(name: str) -> str:
    """1,000 x 5,000 x 10,000: 0.1 TFLOP, so 1 ms; its 130 MB alone would take 0.13 ms."""
    return f"\n  %{name} = bf16[1000,10000]{{1,0}} fusion(%a.1, %b.1), kind=kCustom, calls=%matmul"


def predict(entry: str, wires=None, before: str = "") -> roofline.Roofline:
    found = roofline.predict(read(entry, before), RATES, wires or {})
    parts = found.gemm_ms + found.attention_ms + found.memory_ms + found.exposed_ms + found.host_exposed_ms
    assert found.step_ms == pytest.approx(parts), "every millisecond of the step has a name"
    return found


def one(lines: str, before: str = "") -> result.Kernel:
    """The only kernel of a program."""
    (kernel,) = predict(lines, before=before).kernels
    return kernel


# ---- Kernels


def test_gemm_and_memory_bound():
    found = predict(gemm("g") + f"\n  ROOT %m = {BIG} fusion(%x), kind=kLoop, calls=%twice")
    assert (found.gemm_ms, found.memory_ms, found.step_ms) == pytest.approx((1.0, 0.2, 1.2)), "100 MB read once, 100 written"
    assert found.flops == 1e11 and found.bound_by == "matrix products 83% of the step"


def test_narrow_gemm_is_bound_by_memory():
    entry = "\n  ROOT %d = bf16[1,10000]{1,0} dot(%v, %b.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = predict("\n  %v = bf16[1,5000]{1,0} parameter(3)" + entry)
    assert found.flops == 2 * 5000 * 10000
    assert found.gemm_ms == pytest.approx((5000 + 5000 * 10000 + 10000) * 2 / 1e9), "ms at 1 TB/s"


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas_call(target):
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
    line = "%g = (bf16[1000,10000]{1,0}, s8[4194304]{0}) custom-call(%a.1, %b.1)"
    kernel = one(f'\n  ROOT {line}, custom_call_target="{target}", backend_config={json.dumps(config)}')
    ms = 0.5 if target.endswith("f8") else 1.0
    least = predict(f'\n  ROOT {line}, custom_call_target="{target}", backend_config={json.dumps(config)}').gemm_least_ms
    assert least == pytest.approx(ms), "at the rate of its own type"
    assert (kernel.kind, kernel.tflop, kernel.ms) == ("gemm", pytest.approx(0.1), pytest.approx(ms))
    assert kernel.gb == pytest.approx(0.13), "without the workspace"


def test_an_fp8_call_without_a_rate_is_refused():
    config = json.dumps({"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}})
    line = "%g = (bf16[1000,10000]{1,0}, s8[4194304]{0}) custom-call(%a.1, %b.1)"
    module = read(f'\n  ROOT {line}, custom_call_target="__cublas$lt$matmul$f8", backend_config={config}')
    with pytest.raises(HloError, match="a GEMM in 8-bit floating point, for which the rates .round figures. have no figure"):
        roofline.predict(module, dataclasses.replace(RATES, fp8_tflops=0.0), {})


def test_cublas_call_that_writes_into_a_stack():
    """XLA's dynamic-slice fusion: the GEMM's output goes straight to its place in an array of 40 of them."""
    stack, out = "bf16[40,1000,10000]{2,1,0}", "bf16[1000,10000]{1,0}"
    config = json.dumps({"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}})
    before = f"""
%into (a: bf16[1000,5000], b: bf16[5000,10000], s: bf16[40,1000,10000], n: s32[]) -> (bf16[40,1000,10000], s8[4194304]) {{
  %a = bf16[1000,5000]{{1,0}} parameter(0)
  %b = bf16[5000,10000]{{1,0}} parameter(1)
  %s = {stack} parameter(2)
  %n = s32[] parameter(3)
  %zero = s32[] constant(0)
  %g = ({out}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={config}
  %made = {out} get-tuple-element(%g), index=0
  %row = bf16[1,1000,10000]{{2,1,0}} bitcast(%made)
  %put = {stack} dynamic-update-slice(%s, %row, %n, %zero, %zero)
  %space = s8[4194304]{{0}} get-tuple-element(%g), index=1
  ROOT %both = ({stack}, s8[4194304]{{0}}) tuple(%put, %space)
}}
"""
    arguments = f"\n  %stack = {stack} parameter(3)\n  %number = s32[] parameter(4)"
    call = f"({stack}, s8[4194304]{{0}}) fusion(%a.1, %b.1, %stack, %number), kind=kCustom, calls=%into"
    kernel = one(f"{arguments}\n  ROOT %f = {call}", before)
    assert (kernel.kind, kernel.tflop, kernel.gb) == ("gemm", pytest.approx(0.1), pytest.approx(0.13))


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [("NO_MASK", 0, 64 * 64), ("CAUSAL", 0, 64 * 32), ("PADDING_CAUSAL", 0, 64 * 32), ("CAUSAL", 16, 64 * (16 - 2))],
)
@pytest.mark.parametrize(("target", "factor", "rate"), [("", 1.0, 50.0), ("Backward", 2.5, 25.0)])
def test_attention_call(mask, window, pairs, target, factor, rate):
    """2 sequences of 64, 4 heads of 8: 4 x 8 FLOPs for each pair inside the mask, of every head."""
    q, kv = "bf16[2,64,4,8]{3,2,1,0}", "bf16[2,64,2,8]{3,2,1,0}"
    config = json.dumps({"cudnn_fmha_backend_config": {"mask_type": mask, "sliding_window_length": window}})
    arguments = f"\n  %q = {q} parameter(3)\n  %k = {kv} parameter(4)\n  %v = {kv} parameter(5)"
    call = f'custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax{target}", backend_config={config}'
    module = read(f"{arguments}\n  ROOT %o = ({q}, f32[2,4,64]{{2,1,0}}, u8[0]{{0}}) {call}")
    found = roofline.predict(
        module, dataclasses.replace(RATES, attention_forward_tflops=50e-6, attention_backward_tflops=25e-6), {}
    )
    assert found.flops == pytest.approx(2 * 4 * pairs * 4 * 8 * factor)
    rate *= rates.over_length(64, rate == 25.0)
    assert found.attention_ms == pytest.approx(found.flops / rate / 1e3), "50 and 25 MFLOP/s at 8,192 keys, and here 64"


@pytest.mark.parametrize(("mask", "pairs"), [("causal", 64 * 32), ("all", 64 * 64), ("window16", 64 * (16 - 2))])
@pytest.mark.parametrize(
    ("kernel", "factor", "rate"),
    [("forward", 1.0, 50.0), ("backward_q", 2.5 * 3 / 7, 25.0), ("backward_kv", 2.5 * 4 / 7, 25.0)],
)
def test_pallas_attention_call(mask, pairs, kernel, factor, rate):
    """As cuDNN's, at the stated part of its rate; what is computed stands in the name."""
    q, kv, ids = "bf16[2,64,4,8]{3,2,1,0}", "bf16[2,64,2,8]{3,2,1,0}", "s32[2,64]{1,0}"
    config = f'{{debug = false, ir = "ML\\EFR{{", name = "jaxtrain_attention_{kernel}_{mask}", num_warps = 8 : i32}}'
    names = "".join(f"\n  %i{n} = {ids} parameter({n + 3})" for n in range(5))
    arguments = f"{names}\n  %q = {q} parameter(8)\n  %k = {kv} parameter(9)\n  %v = {kv} parameter(10)"
    operands = "%i0, %i1, %i2, %i3, %i4, %q, %k, %v"
    call = f'custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton", backend_config={config}'
    module = read(f"{arguments}\n  ROOT %o = {q} {call}")
    found = roofline.predict(
        module, dataclasses.replace(RATES, attention_forward_tflops=50e-6, attention_backward_tflops=25e-6), {}
    )
    assert found.flops == pytest.approx(2 * 4 * pairs * 4 * 8 * factor)
    rate *= PALLAS_FRACTION * rates.over_length(64, kernel != "forward")
    assert found.attention_ms == pytest.approx(found.flops / rate / 1e3)


def test_another_triton_call_is_not_taken_for_attention():
    q = "bf16[2,64,4,8]{3,2,1,0}"
    call = 'custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "theirs"}'
    with pytest.raises(HloError, match="custom call '__gpu.xla.gpu.triton'"):
        roofline.predict(read(f"\n  %q = {q} parameter(3)\n  ROOT %o = {q} {call}"), RATES, {})


def test_slice_of_a_stacked_weight_counts_as_the_slice():
    """Of 40 layers of 10 MB each one is read, converted to bfloat16 and written."""
    stack, layer = "f32[40,2500000]{1,0}", "f32[1,2500000]{1,0}"
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
    arguments = f"\n  %stack = {stack} parameter(3)\n  %number = s32[] parameter(4)\n  %nought = s32[] constant(0)"
    fused = one(f"{arguments}\n  ROOT %f = bf16[2500000]{{0}} fusion(%stack, %number), kind=kLoop, calls=%layer", before)
    assert fused.gb == pytest.approx(0.010 + 0.005, rel=1e-5)
    sizes = "dynamic_slice_sizes={1,2500000}"
    alone = one(f"{arguments}\n  ROOT %f = {layer} dynamic-slice(%stack, %number, %nought), {sizes}")
    assert alone.gb == pytest.approx(0.020, rel=1e-5)


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
    whole = one(f"{arguments}\n  ROOT %f = {call}", elsewhere).gb
    assert whole == pytest.approx(0.005 + 0.390 + 0.400, rel=1e-5), "an update of what the fusion makes writes all of it"


def test_what_is_read_once_counts_once_and_what_is_made_up_not_at_all():
    before = f"""
%halves (p: f32[{ELEMENTS}]) -> (f32[12500000], f32[{ELEMENTS}]) {{
  %p = {BIG} parameter(0)
  %first = f32[12500000]{{0}} slice(%p), slice={{[0:12500000]}}
  %second = f32[12500000]{{0}} slice(%p), slice={{[12500000:25000000]}}
  %sum = f32[12500000]{{0}} add(%first, %second)
  %zero = f32[] constant(0)
  %zeros = {BIG} broadcast(%zero), dimensions={{}}
  ROOT %both = (f32[12500000]{{0}}, {BIG}) tuple(%sum, %zeros)
}}
"""
    kernel = one(f"\n  ROOT %f = (f32[12500000]{{0}}, {BIG}) fusion(%x), kind=kLoop, calls=%halves", before)
    assert kernel.gb == pytest.approx(0.100 + 0.050 + 0.100)


def test_a_small_kernel_still_takes_its_launch():
    kernel = one("\n  %s = s32[] parameter(3)\n  ROOT %n = s32[] add(%s, %s)")
    assert kernel.ms == pytest.approx(1e-3)


# ---- The schedule


def test_collective_fully_hidden():
    start = f"\n  %ag = {GATHER}"
    found = predict(start + gemm("g") + gemm("h") + f"\n  ROOT %done = {BIG} all-gather-done(%ag)", moves("ag"))
    assert found.step_ms == pytest.approx(2.0) and found.exposed_ms == 0
    assert found.communication_ms == pytest.approx(1.01)
    gather = found.collectives["ag"]
    assert (gather.count, gather.ms, gather.exposed_ms) == pytest.approx((1, 1.01, 0.0))


def test_collective_partly_exposed_and_the_next_one_waits_for_the_link():
    """The second is started at 0 too, but runs from 1.01 to 2.02: of that, compute waits from 1.01 (the first's wait) on."""
    second = f"\n  %ag.2 = {GATHER}"
    lines = (
        f"\n  %ag = {GATHER}{second}{gemm('g')}\n  %d = {BIG} all-gather-done(%ag)\n  ROOT %d.2 = {BIG} all-gather-done(%ag.2)"
    )
    found = predict(lines, moves("ag") | moves("ag.2"))
    assert found.step_ms == pytest.approx(2.02)
    assert found.collectives["ag"].exposed_ms == pytest.approx(0.01)
    assert found.collectives["ag.2"].exposed_ms == pytest.approx(1.01)
    assert found.bound_by == "exposed communication 50% of the step"


def test_synchronous_collectives_block():
    plain = f"\n  ROOT %ag = {BIG} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"
    assert predict(gemm("g") + plain, moves("ag")).exposed_ms == pytest.approx(1.01)
    marked = f'\n  %ag = {GATHER}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}'
    found = predict(marked + gemm("g") + f"\n  ROOT %d = {BIG} all-gather-done(%ag)", moves("ag"))
    assert found.step_ms == pytest.approx(2.01)


def test_network_where_it_is_slower():
    lines = f"\n  ROOT %ag = {BIG} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"
    assert predict(lines, moves("ag", network=50.0, hops=1)).step_ms == pytest.approx(5.1)
    assert predict(lines, moves("ag", network=1.0, hops=1)).step_ms == pytest.approx(1.11), (
        "NVLink still takes 1.01 ms for its part"
    )
    assert predict(lines, moves("ag", network=50.0, hops=127)).step_ms == pytest.approx(5 + 12.7)


def test_collective_in_a_fusion():
    before = f"""
%sum (l: f32[], r: f32[]) -> f32[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}}

%reduce_all (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p = {BIG} parameter(0)
  ROOT %ar = {BIG} all-reduce(%p), to_apply=%sum
}}
"""
    start = f"\n  %fs = (({BIG}), {BIG}) fusion-start(%x), kind=kCustom, calls=%reduce_all"
    lines = start + gemm("g") + f"\n  ROOT %d = {BIG} fusion-done(%fs)"
    assert predict(lines, moves("fs", 200.0), before).exposed_ms == pytest.approx(1.02)


def test_nested_loops():
    """3 x (4 x (gather beside a GEMM) + one GEMM): the gather takes 1.01 ms, so 0.01 of each is exposed."""
    state = "(s32[], bf16[1000,5000]{1,0}, bf16[5000,10000]{1,0}, " + BIG + ")"
    unpack = f"""
  %t = {state} parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %a.1 = bf16[1000,5000]{{1,0}} get-tuple-element(%t), index=1
  %b.1 = bf16[5000,10000]{{1,0}} get-tuple-element(%t), index=2
  %x = {BIG} get-tuple-element(%t), index=3"""
    pack = f"\n  ROOT %out = {state} tuple(%n, %a.1, %b.1, %x)\n}}\n"

    def loop(name: str, body: str, trips: int) -> str:
        config = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
        return f"\n  {name} = {state} while(%t), condition=%never, body=%{body}, backend_config={config}"

    def numbered(lines: str, mark: str) -> str:
        for name in ("t", "n", "a.1", "b.1", "x", "g", "ag", "d", "out"):
            lines = lines.replace(f"%{name} ", f"%{name}.{mark} ").replace(f"%{name},", f"%{name}.{mark},")
            lines = lines.replace(f"%{name})", f"%{name}.{mark})")
        return lines

    inner = f"\n  %ag = {GATHER}{gemm('g')}\n  %d = {BIG} all-gather-done(%ag)"
    before = (
        f"\n%never (t: s32[]) -> pred[] {{\n  %t.0 = {state} parameter(0)\n  ROOT %false = pred[] constant(false)\n}}\n"
        + "\n%inner (t: s32[]) -> s32[] {"
        + numbered(unpack + inner + pack, "1")
        + "\n%outer (t: s32[]) -> s32[] {"
        + numbered(unpack + loop("%w", "inner", 4) + gemm("g") + pack, "2")
    )
    start = f"\n  %n = s32[] constant(0)\n  %t = {state} tuple(%n, %a.1, %b.1, %x)"
    found = predict(start + loop("ROOT %v", "outer", 3), moves("ag.1"), before)
    assert found.step_ms == pytest.approx(3 * (4 * 1.01 + 1.0))
    gather = found.collectives["ag.1"]
    assert (gather.count, gather.ms, gather.exposed_ms) == pytest.approx((12, 12.12, 0.12))
    assert found.flops == 15e11 and found.kernels[0].count == 15

    # A gather that the loop runs beside: it holds the link until 5.01, so the first five rounds' own wait for it.
    around = f"\n  %early = {GATHER}{loop('%v', 'outer', 3)}\n  ROOT %late = {BIG} all-gather-done(%early)"
    busy = predict(start + around, moves("ag.1") | moves("early", 500.0), before)
    assert busy.collectives["early"].exposed_ms == 0
    assert busy.step_ms == pytest.approx(found.step_ms - 1.01 + 6.06), "the first inner round ends when its gather does"


def test_slowest_branch():
    before = f"""
%fast (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  ROOT %p.1 = {BIG} parameter(0)
}}

%slow (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p.2 = {BIG} parameter(0)
  ROOT %n = {BIG} negate(%p.2)
}}
"""
    branches = "branch_computations={%fast, %slow, %fast}"
    found = predict(f"\n  %i = s32[] constant(0)\n  ROOT %c = {BIG} conditional(%i, %x, %x, %x), {branches}", before=before)
    assert found.step_ms == pytest.approx(0.2)


def test_copies_to_the_host_run_beside_compute():
    host = f"f32[{ELEMENTS}]{{0:S(5)}}"
    start = f"\n  %cs = ({host}, {BIG}, u32[]) copy-start(%x)"
    found = predict(start + gemm("g") + f"\n  ROOT %cd = {host} copy-done(%cs)")
    assert (found.host_ms, found.host_exposed_ms) == pytest.approx((5.0, 4.0)), "100 MB at 20 GB/s, a GEMM of 1 ms beside it"
    assert found.kernels[0].kind == "host" and found.communication_ms == 0
    here = start.replace(":S(5)", "") + gemm("g") + f"\n  ROOT %cd = {BIG} copy-done(%cs)"
    assert predict(here).step_ms == pytest.approx(1.0), "a copy inside the device hides behind the GEMM"


# ---- Refusals


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (f"\n  ROOT %odd = {BIG} convolution(%x, %x), window={{size=1}}", "odd: how long a convolution takes"),
        (f'\n  ROOT %odd = {BIG} custom-call(%x), custom_call_target="mystery"', "odd: how long the custom call 'mystery'"),
        (f"\n  ROOT %odd = {BIG} collective-permute(%x), source_target_pairs={{{{0,1}}}}", "odd: nothing says how many bytes"),
        (
            f"\n  ROOT %odd = ({BIG}, {BIG}) all-gather-start(%x), dimensions={{0}}",
            "odd: started in the computation main and not",
        ),
    ],
)
def test_what_is_not_understood_is_refused(lines, message):
    with pytest.raises(HloError, match=message):
        predict(lines, moves("odd") if "all-gather" in lines else None)


def test_unknown_opcode_in_a_fusion_and_unscheduled_modules_are_refused():
    before = f"""
%strange (p: f32[{ELEMENTS}]) -> f32[{ELEMENTS}] {{
  %p.1 = {BIG} parameter(0)
  ROOT %fft = {BIG} fft(%p.1), fft_type=RFFT, fft_length={{1}}
}}
"""
    with pytest.raises(HloError, match="odd: .* because of the fft fft inside"):
        predict(f"\n  ROOT %odd = {BIG} fusion(%x), kind=kLoop, calls=%strange", before=before)
    unscheduled = dataclasses.replace(read(gemm("g").replace("%g", "ROOT %g")), is_scheduled=False)
    with pytest.raises(HloError, match="not scheduled"):
        roofline.predict(unscheduled, RATES, {})


# ---- Names


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        ("jit(train_step)/jvp(layers)/while/body/eval_jaxpr/mlp/BTD,DF->BTF/dot_general", "forward mlp/BTD,DF->BTF"),
        ("jit(f)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/mul", "recompute mlp/mul"),
        ("jit(f)/transpose(jvp(layers))/while/body/attention/add_any", "backward attention/add_any"),
        ("jit(f)/transpose(jvp(layers))/while/body/(mlp/BTD,BTF->DF:attention/BTD,BTNH->DNH)", "backward mlp/BTD,BTF->DF"),
        ("jit(f)/jvp(loss)/shard_map/while/body/CD,VD->CV/dot_general", "loss CD,VD->CV"),
        ("jit(f)/optimizer/jit(tree_bias_correction)/div", "optimizer div"),
        ("", ""),
    ],
)
def test_labels(op_name, name):
    assert roofline.label(op_name) == name


# ---- FLOPs of real programs


def llama3_8b(*overrides: str):
    loaded = launch.load(["--config=configs/llama3_8b.py", "--config.model.num_layers=2", "--config.train.global_batch=8",
                          "--config.train.grad_accum=1", "--config.remat.tensors=", *overrides])  # fmt: skip
    assert not loaded.problems and loaded.run is not None
    return loaded.run


@pytest.mark.parametrize("policy", few(("full", "none", "dots", "attention"), "full"))
def test_flops_of_llama3_8b_on_described_gpus(policy):
    run = llama3_8b(f"--config.remat.policy={policy}")
    compiled = compile_step(run, topology.parse("h200:8"))
    module = hlo.parse(compiled.text)
    wires = collectives.by_instruction(collectives.read(module, dict(compiled.program.placement.mesh.shape), 8))
    gpu = hardware.lookup("NVIDIA H200")
    assert gpu
    found = roofline.predict(module, rates.datasheet(gpu, "bf16"), wires)
    assert found.flops == pytest.approx(roofline.expected_flops(run, 8, compiled.program.attention), rel=0.01)
    assert {"forward", "backward", "optimizer", "loss"} <= {k.op_name.split()[0] for k in found.kernels}
    again = {k.op_name for k in found.kernels if k.kind in ("gemm", "attention") and k.op_name.startswith("recompute")}
    assert bool(again) == (policy != "none")
    assert sum(k.ms for k in found.kernels if k.kind == "gemm") == pytest.approx(found.gemm_ms)


def test_flops_of_a_small_model_on_this_cpu():
    """XLA's CPU compiler, and attention by definition: the whole square, twice as much backward as forward."""
    for policy in ("none", "full"):
        run = tiny({"remat.policy": policy})
        module = hlo.parse(train_step(run).as_text() or "")
        found = roofline.predict(module, RATES, {})
        assert program(run).attention == "reference"
        assert found.flops == pytest.approx(roofline.expected_flops(run, 1, "reference"), rel=0.01)


def test_flops_of_an_unknown_attention_kernel_are_refused():
    with pytest.raises(ValueError, match="'mystery': its FLOPs are not known"):
        roofline.expected_flops(tiny(), 1, "mystery")


# ---- Rates


H200 = hardware.lookup("NVIDIA H200")
MEASURED = dataclasses.replace(RATES, source="calibrated on H200 SXM, 2026-11-21", fp8_tflops=0.0)


def test_datasheet_rates():
    assert H200
    found = rates.datasheet(H200, "bf16")
    assert (found.gemm_tflops, found.fp8_tflops) == pytest.approx((720.0, 1280.0), rel=1e-3)
    assert (found.attention_forward_tflops, found.attention_backward_tflops) == pytest.approx((529.0, 518.0))
    assert (found.memory_tb_s, found.nvlink_gb_s, found.network_gb_s) == pytest.approx((4.08, 370.0, 45.0))
    assert rates.datasheet(H200, "fp8") == found
    assert rates.datasheet(H200, "f32").attention_forward_tflops == pytest.approx(529.0 / 989.4 * 66.9)
    assert found.source == "published kernel rates"
    for _, gpu in hardware.TABLE:
        sheet = dataclasses.asdict(rates.datasheet(gpu, "bf16"))
        assert (sheet.pop("fp8_tflops") > 0) == (gpu.sm >= 89)
        assert min(v for v in sheet.values() if isinstance(v, float)) > 0
        # The record of a search for the best shape, H200: 794.5 of 989.4 TFLOP/s and 1,453 of 1,978.9 in FP8.
        assert rates.datasheet(gpu, "bf16").gemm_tflops <= 794.5 / 989.4 * gpu.bf16
        assert rates.datasheet(gpu, "bf16").fp8_tflops <= 1453 / 1978.9 * gpu.fp8
    a100 = hardware.lookup("A100-SXM4-80GB")
    assert a100
    with pytest.raises(ValueError, match="'fp8': A100 SXM 80GB has no GEMMs of this type"):
        rates.datasheet(a100, "fp8")
    with pytest.raises(ValueError, match="compute capability 12.0"):
        rates.datasheet(dataclasses.replace(a100, sm=120), "bf16")


@pytest.mark.parametrize(
    ("keys", "forward", "backward"),
    [(16, 518, 499), (4096, 518, 499), (8192, 529, 518), (16384, 539, 516), (131072, 539, 516), (11585, 534, 517)],
)
def test_attention_runs_at_the_rate_of_its_length(keys, forward, backward):
    """By the call's keys: as measured at 4k, 8k and 16k, between them in equal steps of log keys, and constant outside."""
    assert H200
    sheet = rates.datasheet(H200, "bf16")
    for rate, back in ((forward, False), (backward, True)):
        done = Work("attention", 1e12, backward=back, keys=keys)
        assert 1 / done.seconds(sheet) == pytest.approx(rate, rel=1e-4)
        assert rates.over_length(keys, back) <= rates.fastest_attention(back)


def on_links(kind: str, mib: float, nodes: int) -> float:
    """Bus bandwidth in GB/s that a plan gives a collective over all GPUs of nodes with 8 H200s, as nccl-tests define it."""
    assert H200
    n = 8 * nodes
    given = mib * 2**20 / (n if kind == "all-gather" else 1)
    sent = collectives._ring(kind, given, n)
    hops = collectives._hops(kind, nodes)
    found = collectives.Found(kind, "f32", "fsdp", n, 1, sent, sent / 8 if nodes > 1 else 0.0, "", "", "c", (), hops)
    assert found.message == pytest.approx(mib * 2**20)
    work = roofline.work(*next((m, m.entry, m.entry.root) for m in [read(ROOT)]), {"c": found})
    return sent / work.seconds(rates.datasheet(H200, "bf16")) / 1e9


ROOT = f"\n  ROOT %c = {BIG} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"


def test_small_messages_are_slower():
    """One node: 370 GB/s for the largest, the shape of the published sweep below, and 10 us for the smallest."""
    speeds = [on_links("all-gather", mib, 1) for mib in (1 / 1024, 1 / 32, 1, 8, 64, 512, 16384)]
    assert speeds == pytest.approx([0.09, 2.87, 30.6, 119.3, 265.9, 345.5, 370.0], rel=0.01)
    assert on_links("all-reduce", 64, 1) == on_links("all-gather", 64, 1)
    seconds = [size / on_links("all-gather", size / 2**20, 1) for size in (2 ** (n / 4) for n in range(40, 140))]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(seconds, seconds[1:], strict=False)), "more bytes never take less time"


@pytest.mark.parametrize(
    ("kind", "mib", "nodes", "published", "within"),
    [
        # NVIDIA/nccl issue 1229: reduce-scatters over H100s; its sizes are not given, and 2 GiB are assumed.
        *(("reduce-scatter", 2048, 2**n, gb_s, 0.1) for n, gb_s in enumerate((360, 345, 320, 300, 280, 260), 2)),
        # NVIDIA/nccl-tests issue 283: all-reduces over 248 nodes of 8 H200s, mostly about 350 and at times below 300.
        ("all-reduce", 512, 248, 325, 0.1),
    ],
)
def test_collectives_over_many_nodes_beside_published_ones(kind, mib, nodes, published, within):
    """In docs/plan.md, too."""
    assert on_links(kind, mib, nodes) == pytest.approx(published, rel=within)


def test_calibration_is_kept_by_gpu(tmp_path):
    assert H200
    assert rates.load(H200.name, tmp_path) is None
    assert rates.rates_for(H200, "bf16", tmp_path) == rates.datasheet(H200, "bf16")
    file = rates.save(MEASURED, H200.name, tmp_path / "new")
    assert file == tmp_path / "new" / "H200_SXM.json" and [p.name for p in file.parent.iterdir()] == [file.name]
    assert rates.rates_for(H200, "bf16", tmp_path / "new") == MEASURED
    other = rates.rates_for(H200, "f32", tmp_path / "new")
    assert (other.gemm_tflops, other.memory_tb_s) == pytest.approx((720 / 989.4 * 66.9, 1.0))
    assert other.source == "calibrated on H200 SXM, 2026-11-21; f32 arithmetic at published kernel rates"
    eight = rates.rates_for(H200, "fp8", tmp_path / "new")
    assert (eight.gemm_tflops, eight.fp8_tflops) == (MEASURED.gemm_tflops, rates.datasheet(H200, "fp8").fp8_tflops)
    assert eight.source.endswith("; fp8 arithmetic at published kernel rates")
    both = dataclasses.replace(MEASURED, fp8_tflops=1200.0)
    rates.save(both, H200.name, tmp_path / "new")
    assert rates.rates_for(H200, "fp8", tmp_path / "new") == both


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-20], "line"),
        (lambda text: "[]", "not of format 2"),
        (lambda text: text.replace('"format": 2', '"format": 1'), "not of format 2"),
        (lambda text: text.replace("0.99009", "1.99009"), "collective_curve = .* is no table"),
        (lambda text: text.replace('"network_curve": [', '"network_curve": [[2.0, 1.0],'), "network_curve = .* is no table"),
        (lambda text: text.replace("H200 SXM", "H100 SXM"), "rates of 'H100 SXM'"),
        (lambda text: text.replace('"memory_tb_s": 1.0', '"memory_tb_s": -1.0'), "memory_tb_s = -1.0 is no positive number"),
        (lambda text: text.replace('"memory_tb_s": 1.0', '"memory_tb_s": NaN'), "memory_tb_s = nan is no positive number"),
        (lambda text: text.replace('"memory_tb_s": 1.0,', ""), "memory_tb_s"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path, change, reason):
    file = rates.save(MEASURED, "H200 SXM", tmp_path)
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=f"H200_SXM.json: not a calibration of H200 SXM .*{reason}.*--calibrate"):
        rates.load("H200 SXM", tmp_path)
