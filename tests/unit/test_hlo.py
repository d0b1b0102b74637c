"""The reader of HLO text: small programs, refusals, and whole programs compiled for a CPU and for a GPU."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import jaxtrain
from jaxtrain.plan import topology
from jaxtrain.plan.program import hlo

PACKAGE = Path(jaxtrain.__file__).resolve().parent

# Frames 1, 2 and 3 are nested calls; the text holds the parent's number plus one.
TEXT = f"""HloModule jit_made, is_scheduled=true, \
input_output_alias={{ {{0}}: (0, {{}}, may-alias), {{1, 2}}: (3, {{0}}, must-alias) }}, num_partitions=4

FileNames
1 "/home/somebody/train.py"
2 "{PACKAGE}/models/layers.py"
3 "/opt/lib/python3.12/site-packages/optax/_src/transform.py"

FunctionNames
1 "<module>"
2 "call"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=4}}
2 {{file_name_id=2 function_name_id=2 line=34 end_line=34}}
3 {{file_name_id=3 function_name_id=2 line=56 end_line=56}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=3 parent_frame_id=2}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%kernel (p.1: bf16[8,128], p.0: s32[]) -> (bf16[8,128], f32[8]) {{
  %p.1 = bf16[8,128]{{1,0:T(8,128)S(5)}} parameter(1)
  %p.0 = s32[] parameter(0)
  %zero = f32[] constant(0)
  %wide = f32[8,128]{{1,0}} convert(%p.1)
  %rows = f32[8]{{0}} reduce(%wide, %zero), dimensions={{1}}, to_apply=%add
  ROOT %both = (bf16[8,128]{{1,0}}, f32[8]{{0}}) tuple(%p.1, /*index=1*/%rows)
}}

ENTRY %main (x: bf16[8,128], i: s32[]) -> f32[8] {{
  %x = bf16[8,128]{{0,1}} parameter(0), sharding={{mesh['a'=2,'b'=2], [{{}}, {{'b'}}]}}, metadata={{op_name="batch[\\'x\\']"}}
  %i = s32[] parameter(1)
  %weights = s4[3,5]{{1,0:E(4)}} constant({{...}})
  %table = s32[2,2]{{1,0}} constant({{ {{ 1, 2 }}, {{ 3, -4 }} }})
  %both.1 = (bf16[8,128]{{1,0}}, f32[8]{{0}}) fusion(%i, %x), kind=kInput, calls=%kernel, control-predecessors={{%table}}, \
metadata={{op_name="jit(f)/layers/norm" stack_frame_id=3}}, backend_config={{"a":{{"b":["c, d=e","}}"]}},"known":"(\\"x\\")"}}
  %rows.1 = f32[8]{{0}} get-tuple-element(%both.1), index=1, metadata={{op_name="jit(f)/sum" stack_frame_id=1}}
  %gemm = f32[8]{{0}} custom-call(%rows.1, /*index=1*/%x), custom_call_target="__cublas$gemm", \
operand_layout_constraints={{f32[8]{{0}}, bf16[8,128]{{1,0}}}}, metadata={{op_name="adam" stack_frame_id=4}}
  %piece = f32[4]{{0}} slice(%gemm), slice={{[0:4]}}
  ROOT %out = f32[8]{{0}} pad(%piece, %rows.1), padding=0_4
}}
"""


@pytest.fixture(scope="module")
def made() -> hlo.Module:
    return hlo.parse(TEXT)


def test_header_and_computations(made):
    assert (made.name, made.num_partitions, made.is_scheduled) == ("jit_made", 4, True)
    assert list(made.computations) == ["add", "kernel", "main"] and made.entry is made.computations["main"]
    assert [i.name for i in made.entry.instructions] == (
        ["x", "i", "weights", "table", "both.1", "rows.1", "gemm", "piece", "out"]
    )
    kernel = made.computations["kernel"]
    assert [p.name for p in kernel.parameters] == ["p.0", "p.1"], "by number, not in the order of the text"
    assert kernel.root.name == "both" and kernel.root.is_root
    assert made.owners["rows"] is kernel


def test_types(made):
    x, weights, both = (made.entry.by_name[n].type for n in ("x", "weights", "both.1"))
    assert x == hlo.Shape("bf16", (8, 128)) and (x.elements, x.bytes) == (1024, 2048)
    assert weights.bytes == 8, "15 numbers of 4 bits"
    assert both == (hlo.Shape("bf16", (8, 128)), hlo.Shape("f32", (8,)))
    assert [leaf.dtype for leaf in hlo.leaves((both, x))] == ["bf16", "f32", "bf16"]
    assert made.computations["kernel"].by_name["p.1"].type.memory_space == 5
    assert made.entry.by_name["i"].type == hlo.Shape("s32", ()) and made.entry.by_name["i"].type.bytes == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("pred[3]{0}", 3),
        ("f8e4m3fn[4,4]{1,0}", 16),
        ("f4e2m1fn[3]{0}", 2),
        ("c64[2]{0}", 16),
        ("f32[<=10,2]{1,0}", 80),
        ("token[]", 0),
        ("()", 0),
        ("((f32[2]{0}, (s8[3]{0}, u4[2]{0})), /*index=1*/bf16[])", 8 + 3 + 1 + 2),
    ],
)
def test_sizes(text, size):
    module = hlo.parse(f"HloModule m\n\nENTRY %e () -> f32[] {{\n  ROOT %y = {text} custom-call()\n}}\n")
    assert sum(leaf.bytes for leaf in hlo.leaves(module.entry.root.type)) == size


def test_instructions(made):
    at = made.entry.by_name
    fusion = at["both.1"]
    assert (fusion.opcode, fusion.operands, fusion.called) == ("fusion", ("i", "x"), ("kernel",))
    assert fusion.attributes["kind"] == "kInput"
    assert fusion.attributes["control-predecessors"] == "{%table}"
    assert fusion.attributes["backend_config"] == '{"a":{"b":["c, d=e","}"]},"known":"(\\"x\\")"}'
    assert at["gemm"].operands == ("rows.1", "x")
    assert at["gemm"].attributes["custom_call_target"] == '"__cublas$gemm"'
    assert at["rows.1"].attributes["index"] == "1"
    assert at["piece"].attributes["slice"] == "{[0:4]}" and at["out"].attributes["padding"] == "0_4"
    assert at["table"].attributes["literal"] == "{ { 1, 2 }, { 3, -4 } }" and at["table"].operands == ()
    assert (at["i"].parameter_number, at["gemm"].parameter_number) == (1, None)
    assert made.computations["kernel"].by_name["rows"].called == ("add",)
    assert made.computations["kernel"].root.operands == ("p.1", "rows")
    assert at["out"].is_root and not at["piece"].is_root


def test_origins(made):
    at = made.entry.by_name
    assert at["x"].op_name == "batch['x']" and at["x"].source == ""
    assert (at["both.1"].op_name, at["both.1"].source) == ("jit(f)/layers/norm", "jaxtrain/models/layers.py:34"), (
        "the innermost frame of this package, under a frame of a library"
    )
    assert at["rows.1"].source == "train.py:12"
    assert at["gemm"].source == "optax/_src/transform.py:56", "no frame is of this package: the innermost"


def test_fusions_are_entered_on_request(made):
    outside = [(i.name, where.name, times, loops) for i, where, times, loops in hlo.walk(made)]
    assert outside == [(i.name, "main", 1, ()) for i in made.entry.instructions]
    inside = [i.name for i, *_ in hlo.walk(made, fusions=True)]
    assert inside[4:8] == ["both.1", "p.1", "p.0", "zero"] and "sum" not in inside


# ---- Loops


def loop(counts: str = "", start: str = "constant(2)", bound: str = "constant(14)", step: str = "constant(3)") -> str:
    """Return a while loop with a counter, in fusions as XLA makes them. The loop contains a call and a conditional."""
    return f"""HloModule loops, is_scheduled=true

%less (l: s32[], m: s32[]) -> pred[] {{
  %l = s32[] parameter(0)
  %m = s32[] parameter(1)
  ROOT %lt = pred[] compare(%l, %m), direction=LT
}}

%condition (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]{{0}}) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %bound = s32[] {bound}
  ROOT %again = pred[] fusion(%k, %bound), kind=kLoop, calls=%less
}}

%yes (y: f32[4]) -> f32[4] {{
  ROOT %y = f32[4]{{0}} parameter(0)
}}

%no (n: f32[4]) -> f32[4] {{
  %n = f32[4]{{0}} parameter(0)
  ROOT %minus = f32[4]{{0}} negate(%n)
}}

%called (d: f32[4]) -> f32[4] {{
  %d = f32[4]{{0}} parameter(0)
  %which = pred[] constant(true)
  ROOT %chosen = f32[4]{{0}} conditional(%which, %d, %d), true_computation=%yes, false_computation=%no
}}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %t = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %v = f32[4]{{0}} get-tuple-element(%t), index=1
  %step = s32[] {step}
  %next = s32[] add(%j, %step)
  %w = f32[4]{{0}} call(%v), to_apply=%called
  ROOT %carry = (s32[], f32[4]{{0}}) tuple(%next, %w)
}}

ENTRY %main (x: f32[4], given: s32[]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %given = s32[] parameter(1)
  %start = s32[] {start}
  %copied = s32[] copy(%start)
  %first = (s32[], f32[4]{{0}}) tuple(%copied, %x)
  %while.1 = (s32[], f32[4]{{0}}) while(%first), condition=%condition, body=%body{counts}
  ROOT %last = f32[4]{{0}} get-tuple-element(%while.1), index=1
}}
"""


KNOWN = ', backend_config={"known_trip_count":{"n":"7"},"dynamic_variables":[]}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (loop(KNOWN), 7),
        (loop(), 4),  # counter values 2, 5, 8, 11
        (loop(start="constant(14)"), 0),
        (loop(bound="constant(15)"), 5),
        # counter values 20, 17
        (loop(start="constant(20)").replace("direction=LT", "direction=GT").replace("add(%j", "subtract(%j"), 2),
    ],
)
def test_trip_count(text, count):
    module = hlo.parse(text)
    assert hlo.trip_count(module, module.entry.by_name["while.1"]) == count


def test_the_host_waits_for_loops_of_unknown_length_and_for_branches():
    def waits(text, **how):
        return {i.name: times for i, times in hlo.host_waits(hlo.parse(text, **how))}

    assert waits(loop(KNOWN)) == {"chosen": 7}, "each of the loop's rounds, and not its end"
    assert waits(loop()) == {"while.1": 5, "chosen": 4}, "4 rounds and the end"
    # A loop whose trips depend on data runs as often as assumed for the load of the experts. Its end is still read.
    further = loop(SCOPE, bound="add(%k, %k)")
    assert waits(further)["while.1"] == 1
    assert waits(further, further_rounds=2) == {"while.1": 3, "chosen": 2}
    module = hlo.parse(further, further_rounds=2)
    assert hlo.trip_count(module, module.entry.by_name["while.1"]) == 2


SCOPE = ', metadata={op_name="jit(train_step)/jvp(layers)/mlp/experts/further_rounds/while"}'


def test_walk_multiplies_loops_out():
    def times(text):
        return {i.name: (times, loops) for i, _, times, loops in hlo.walk(hlo.parse(text))}

    known = times(loop(KNOWN))
    assert known["while.1"] == (1, ()) and known["last"] == (1, ())
    inside = (7, ("while.1",))
    assert known["carry"] == inside, "the body"
    assert known["which"] == inside, "what the body calls"
    assert known["y"] == inside and known["minus"] == inside, "both branches, each as if it ran every time"
    assert "again" not in known, "XLA does not ask a loop that knows its count"
    counted = times(loop())
    assert counted["carry"] == (4, ("while.1",)) and counted["again"] == (5, ("while.1",)), "asked once more than it runs"
    assert "lt" not in counted, "inside a fusion"


@pytest.mark.parametrize("part", [{"start": "add(%given, %given)"}, {"bound": "add(%k, %k)"}, {"step": "constant(0)"}])
def test_a_loop_whose_count_is_not_known_is_named(part):
    module = hlo.parse(loop(**part))
    with pytest.raises(hlo.HloError, match=r"while.1 \(no op_name, no source\): how often this loop runs cannot be read"):
        list(hlo.walk(module))


def test_a_loop_without_a_body_is_named():
    module = hlo.parse(loop(KNOWN).replace(", body=%body", ""))
    with pytest.raises(hlo.HloError, match="while.1: a while loop without a body"):
        list(hlo.walk(module))


# ---- Whole programs


def program(x_AB, w_LBB):
    """Run a loop over layers inside a loop over rounds. A layer resembles attention. A round has a branch: sort or scatter."""

    def layer(x, w):
        return jnp.tanh(x @ w) + jax.nn.softmax(x @ x.T) @ x, None

    def round(x, _):
        x, _ = jax.lax.scan(layer, x, w_LBB)
        x = jax.lax.cond(x.sum() > 0, lambda x: jnp.sort(x, 0), lambda x: x.at[jnp.argmax(x, 0)].add(1.0), x)
        return x, x.sum()

    return jax.lax.scan(round, x_AB, None, length=3)


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def text(request) -> str:
    device = jax.devices()[0] if request.param == "cpu" else topology.devices(topology.parse("h200:1"))[0]
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device)) for shape in ((8, 16), (5, 16, 16)))
    return jax.jit(program).lower(x, w).compile().as_text() or ""


def test_every_line_of_a_program_is_read(text):
    module = hlo.parse(text)
    lines = re.findall(r"(?m)^ +(?:ROOT )?%[\w.\-]+ = ", text)
    assert sum(len(c.instructions) for c in module.computations.values()) == len(lines) > 50
    for computation in module.computations.values():
        assert len(computation.by_name) == len(computation.instructions)
        for i in computation.instructions:
            assert set(i.operands) <= set(computation.by_name), i
    assert module.is_scheduled
    assert "tests/unit/test_hlo.py" in {i.source.split(":")[0] for i, *_ in hlo.walk(module)}


def test_loops_of_a_program(text):
    """Trip counts that the compiler wrote into the text equal trip counts derived from the loops' counters alone."""
    counts = []
    for source in (text, re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)):
        module = hlo.parse(source)
        whiles = {i.name: (times, loops) for i, _, times, loops in hlo.walk(module) if i.opcode == "while"}
        deepest = max(loops for _, loops in whiles.values())
        tanh = sum(t for i, c, t, _ in hlo.walk(module, fusions=True) if i.opcode == "tanh")
        assert len(deepest) <= 1 and tanh == 3 * 5, whiles
        counts.append(whiles)
    assert counts[0] == counts[1] and counts[0]


# ---- Refusals


ENTRY = "HloModule m\n\nENTRY %e (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not an HLO module"),
        ("module @jit_f {}", "not an HLO module: the text starts with 'module @jit_f {}'"),
        ("HloModule m\n\n", "module m: there is no ENTRY"),
        (ENTRY + "  what is this\n}\n", "not an instruction: 'what is this'"),
        (ENTRY + "  ROOT %y = f32[4]{0} {negate}\n}\n", "y: no opcode after its type"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x\n}\n", "y: a parenthesis is not closed"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x) dimensions\n}\n", "y: its attributes cannot be read: ' dimensions'"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x), kind={a\n}\n", "y: its attributes cannot be read"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x, [4])\n}\n", r"y: its operands cannot be read: '%x, \[4\]'"),
        (ENTRY + "  ROOT %y = f32[four]{0} negate(%x)\n}\n", r"y: its type cannot be read: f32\[four\]"),
        (ENTRY + "  ROOT %y = (f32[4], f99[4]) negate(%x)\n}\n", r"y: its type cannot be read: f99\[4\]"),
        (ENTRY + "  ROOT %y = f32[4]{0} parameter(one)\n}\n", r"y: parameter\(one\) has no number"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x), metadata={stack_frame_id=5}\n}\n", "y: stack frame 5 is not in"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x)\n", "computation e: the text ends inside it"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x)\n}\nand more\n", "not the start of a computation: 'and more'"),
        ("HloModule m\n\nFileNames\nnone\n", "not a row of one of the tables FileNames"),
    ],
)
def test_what_cannot_be_read_is_refused(text, error):
    with pytest.raises(hlo.HloError, match=error):
        hlo.parse(text)
