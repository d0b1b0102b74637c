"""The reader of HLO text: small programs and refusals. proofs/test_plan*.py read whole programs compiled for GPUs."""

import pytest

from jaxtrain.config import launch
from jaxtrain.plan.program import hlo


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f8e4m3fn[4,4]{1,0}", 16),
        ("f4e2m1fn[3]{0}", 2),
        ("c64[2]{0}", 16),
        ("f32[<=10,2]{1,0}", 80),
        ("token[]", 0),
        ("((f32[2]{0}, (s8[3]{0}, u4[2]{0})), /*index=1*/bf16[])", 8 + 3 + 1 + 2),
    ],
)
def test_sizes(text, size):
    module = hlo.parse_hlo(f"HloModule m\n\nENTRY %e () -> f32[] {{\n  ROOT %y = {text} custom-call()\n}}\n")
    assert sum(leaf.bytes for leaf in hlo.leaves(module.entry.root.type)) == size


def test_a_source_is_relative_to_the_package_however_it_was_imported():
    root = launch.REPO
    for path in (
        f"{root}/jaxtrain/kernels/dot.py",
        f"{root}/notebooks/../jaxtrain/kernels/dot.py",
        f"{root}//jaxtrain/./kernels/dot.py",
    ):
        tables = f'FileNames\n1 "{path}"\n\nFunctionNames\n1 "f"\n\n'
        tables += "FileLocations\n1 {file_name_id=1 function_name_id=1 line=39}\n\n"
        tables += "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n"
        entry = "ENTRY %e () -> f32[] {\n  ROOT %y = f32[] custom-call(), metadata={stack_frame_id=1}\n}\n"
        assert hlo.parse_hlo(f"HloModule m\n\n{tables}{entry}").entry.root.source == "jaxtrain/kernels/dot.py:39"


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
        # counter values 20, 17
        (loop(start="constant(20)").replace("direction=LT", "direction=GT").replace("add(%j", "subtract(%j"), 2),
    ],
)
def test_trip_count(text, count):
    module = hlo.parse_hlo(text)
    assert hlo.trip_count(module, module.entry.by_name["while.1"]) == count


def test_the_host_waits_for_loops_of_unknown_length_and_for_branches(monkeypatch):
    monkeypatch.setattr(hlo, "_MOST_TRIPS", 100)

    def waits(text, **how):
        return {i.name: times for i, times in hlo.host_waits(hlo.parse_hlo(text, **how))}

    assert waits(loop(KNOWN)) == {"chosen": 7}  # each of the loop's rounds, and not its end
    assert waits(loop()) == {"while.1": 5, "chosen": 4}  # 4 rounds and the end
    # A loop whose trips depend on data runs as often as assumed for the load of the experts. Its end is still read.
    further = loop(SCOPE, bound="add(%k, %k)")
    assert waits(further)["while.1"] == 1
    assert waits(further, further_rounds=2) == {"while.1": 3, "chosen": 2}
    module = hlo.parse_hlo(further, further_rounds=2)
    assert hlo.trip_count(module, module.entry.by_name["while.1"]) == 2


SCOPE = ', metadata={op_name="jit(train_step)/jvp(layers)/mlp/experts/further_rounds/while"}'


def test_walk_multiplies_loops_out():
    def times(text):
        return {i.name: (times, loops) for i, _, times, loops in hlo.walk(hlo.parse_hlo(text))}

    known = times(loop(KNOWN))
    assert known["while.1"] == (1, ()) and known["last"] == (1, ())
    inside = (7, ("while.1",))
    assert known["carry"] == known["which"] == inside
    assert known["y"] == inside and known["minus"] == inside  # both branches, each as if it ran every time
    assert "again" not in known  # XLA does not ask a loop that knows its count
    counted = times(loop())
    assert counted["carry"] == (4, ("while.1",)) and counted["again"] == (5, ("while.1",))  # asked once more than it runs
    assert "lt" not in counted  # inside a fusion


@pytest.mark.parametrize("part", [{"start": "add(%given, %given)"}, {"bound": "add(%k, %k)"}, {"step": "constant(0)"}])
def test_a_loop_whose_count_is_not_known_is_named(part, monkeypatch):
    monkeypatch.setattr(hlo, "_MOST_TRIPS", 100)
    module = hlo.parse_hlo(loop(**part))
    with pytest.raises(hlo.HloError, match=r"while\.1"):
        list(hlo.walk(module))


# ---- Refusals


ENTRY = "HloModule m\n\nENTRY %e (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "HLO"),
        ("module @jit_f {}", "jit_f"),
        ("HloModule m\n\n", "ENTRY"),
        (ENTRY + "  what is this\n}\n", "what is this"),
        (ENTRY + "  ROOT %y = f32[4]{0} {negate}\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x) dimensions\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x), kind={a\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x, [4])\n}\n", "y: "),
        (ENTRY + "  ROOT %y = (f32[4], f99[4]) negate(%x)\n}\n", "y: .*f99"),
        (ENTRY + "  ROOT %y = f32[4]{0} parameter(one)\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x), metadata={stack_frame_id=5}\n}\n", "y: "),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x)\n", "computation e"),
        (ENTRY + "  ROOT %y = f32[4]{0} negate(%x)\n}\nand more\n", "and more"),
        ("HloModule m\n\nFileNames\nnone\n", "FileNames"),
    ],
)
def test_what_cannot_be_read_is_refused(text, where):
    with pytest.raises(hlo.HloError, match=where):
        hlo.parse_hlo(text)
