"""The table of a run's layout, compared with allocated and computed arrays, and with counts by hand."""

import dataclasses
import functools
import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import devices_of, few, fresh_state, host_batch, program, tiny
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxtrain
from jaxtrain import activations
from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.kernels.attention import reference
from jaxtrain.kernels.experts import routing
from jaxtrain.models import attention, latent_attention, layers, transformer
from jaxtrain.models.remat import Plan, layer_at
from jaxtrain.plan import shardings
from jaxtrain.plan.shardings import Row, Shardings, changes, describe, of_tree, parse_filter, print_shardings
from jaxtrain.plan.topology import TopologyError
from jaxtrain.sharding import LayoutError
from jaxtrain.train.program import build

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "llama3_8b.py")
MESHES = ({"mesh.fsdp": 8}, {"mesh.data": 2, "mesh.fsdp": 4}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
FEW = {"model": {"num_layers": 2}}


THREE = MESHES[2]


@functools.cache
def of(run: RunConfig) -> Shardings:
    """Return the table of a run's shardings on fake devices."""
    return describe(run, devices_of(run))


def table(overrides: dict[str, Any]) -> Shardings:
    return of(tiny(overrides))


def test_rows_say_what_is_allocated():
    """Shapes, bytes and copies of parameters and moments match the arrays of a real state on 8 devices."""
    run = tiny(THREE)
    state = fresh_state(run)
    rows = [r for r in of(run) if r.kind in ("parameter", "moment", "counter")]
    arrays = jax.tree.leaves((state.params, state.optimizer))
    assert len(rows) == len(arrays)
    for row, a in zip(rows, arrays, strict=True):
        parts = [str(s.index) for s in a.addressable_shards]
        assert (row.shape, row.local_shape) == (a.shape, a.addressable_shards[0].data.shape), row.name
        assert row.bytes_per_device == a.addressable_shards[0].data.nbytes and row.total_bytes == a.nbytes
        assert row.replicas == parts.count(parts[0])
        assert row.sharding is not None and row.sharding.is_equivalent_to(a.sharding, a.ndim)


def of_first_layer(run: RunConfig, monkeypatch: pytest.MonkeyPatch, specs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the first layer's named activations of a batch, assembled from each device's shards by their `specs`."""
    made = build(run, devices_of(run))
    seen: dict[str, jax.Array] = {}

    def keep(x: jax.Array, name: str) -> jax.Array:
        return seen.setdefault(name, x) if name in activations.AXES else x

    with monkeypatch.context() as patch:
        for module in (attention, latent_attention, layers, transformer, reference, routing):
            patch.setattr(module, "checkpoint_name", keep)

        def through(self: Any, body: Any, x: Any, stacked: Any, shared: Any, kinds: Any) -> Any:
            # A loop or a checkpoint would not return the arrays.
            for i, kind in enumerate(kinds):
                x = body(x, layer_at(stacked, i), shared, kind)
            return x

        patch.setattr(Plan, "run", through)
        enter = transformer.Transformer.embed_tokens

        def entered(self: Any, tokens: jax.Array) -> Any:
            carry = enter(self, tokens)
            keep(carry[0], shardings.LAYER_INPUT)
            return carry

        patch.setattr(transformer.Transformer, "embed_tokens", entered)

        def local(params: Any, micro: dict[str, jax.Array]) -> dict[str, jax.Array]:
            seen.clear()
            made.definition.bind(params)(micro["tokens"], micro["segments"], micro["positions"])
            return dict(seen)

        p, micro = made.placement, host_batch(run, 0)
        given = made.definition.specs(p), p.spec(("batch", "sequence"))
        return jax.jit(p.shard_map(local, given, P() if specs is None else specs))(fresh_state(run).params, micro)


EXPERTS = {"model.family": "mixtral", "model.num_experts": 4, "model.experts_per_token": 2}
LATENT = {
    "model.num_kv_heads": 8,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 24,
    "model.v_head_dim": 12,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 8,
}
COMPUTED = (
    *MESHES,
    {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.data": 2, **LATENT},
    {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, **EXPERTS},
)


@pytest.mark.parametrize("overrides", few(COMPUTED, THREE, *COMPUTED[-2:]), ids=str)
def test_activations_are_sharded_as_the_table_says(overrides, monkeypatch):
    """Assembled by the table, the shards of 8 devices equal one device's activations."""
    run = tiny(overrides)
    rows = {r.name: r for r in of(run).filter(kind="activation") if r.axes}
    alone = dataclasses.replace(run, mesh=tiny().mesh)
    whole = of_first_layer(alone, monkeypatch)
    own = {"mlp_gate", "mlp_up"} if run.model.num_experts else set()
    wanted = set(whole) - own
    unused = {"attention_lse"} if run.model.num_experts else {"attention_lse", "expert_choice"}
    unused |= set() if run.model.kv_lora_rank else {*activations.LATENTS}
    assert wanted == set(activations.AXES) - own - unused and wanted <= set(rows)
    # A row of experts is on one device and has no spec. Any spec returns it.
    specs = {name: rows[name].spec if name in wanted else P(("fsdp", "expert"), "tensor") for name in whole}
    found = of_first_layer(run, monkeypatch, specs)
    for name in sorted(wanted):
        a, row = found[name], rows[name]
        assert row.shape == a.shape and row.local_shape == a.addressable_shards[0].data.shape, name
        assert row.sharding is not None and row.sharding.is_equivalent_to(a.sharding, a.ndim), name
        for shard in a.addressable_shards:  # replicas too
            np.testing.assert_allclose(shard.data, whole[name][shard.index], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logical_axes_and_rules_give_the_layout(mesh):
    run = tiny(mesh)
    placement = program(run).placement
    checked = 0
    for row in of(run):
        if row.axes is None or row.kind == "gathered":
            continue
        assert row.spec == placement.spec(row.axes), row.name
        checked += row.kind == "activation"
    # The reference kernel returns no log-sum-exp, and this model has no latents.
    assert checked >= len(activations.ACTIVATIONS) - 1 - len(activations.LATENTS)
    found = of(run)
    q, out = found.row("q"), found.row("attention_out")
    assert (out.shape, out.mesh_axes, out.axes) == (q.shape, q.mesh_axes, q.axes)
    assert mesh is not THREE or q.mesh_axes == (("data", "fsdp"), (), ("tensor",), ())


def test_each_activation_has_logical_axes():
    assert {*activations.ACTIVATIONS, shardings.LAYER_INPUT, routing.CHOICE} == set(activations.AXES)


def test_gathered_weights_are_whole_over_the_batch_axes():
    found = table({"mesh.fsdp": 4, "mesh.tensor": 2})
    gate, used = found.row("layers.mlp.gate"), found.row("layers.mlp.gate", "gathered")
    assert (gate.spec, used.spec) == (P(None, "fsdp", "tensor"), P(None, "tensor"))
    assert gate.shape is not None and used.shape == gate.shape[1:] and used.replicas == 4 and gate.replicas == 1
    stacked = {r.name for r in found.filter(name="layers.*", kind="parameter")}
    assert {r.name for r in found.filter(name="layers.*", kind="gathered")} == stacked
    head, used = found.row("head"), found.row("head", "gathered")
    assert used.shape == head.shape and used.spec == P("tensor", None)


GATHERS = (
    {"mesh.fsdp": 2, "mesh.tensor": 2, "sharding.zero": 1},
    {"mesh.fsdp": 2, "mesh.tensor": 2, "sharding.zero": 2, "train.grad_accum": 2},
    {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, **EXPERTS},
    {"mesh.stage": 2, "mesh.fsdp": 2, "train.grad_accum": 4},
)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a traced program, including those of loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jaxprs_in_params(eqn.params):
            yield from equations(body)


@pytest.mark.parametrize("overrides", GATHERS, ids=str)
def test_gathered_weights_are_those_of_the_traced_step(overrides):
    """The table and the step agree on each gathered weight's name, shard shape and dtype."""
    run = tiny(overrides)
    made, found, once = program(run), of(run), run.sharding.zero in (1, 2)
    rows = found.filter(kind="gathered").entries
    names = {r.name for r in found.filter(kind="parameter")}
    assert {r.name for r in rows} == (names if run.sharding.zero == 1 else names - {"embed.embedding"})

    def is_gathered(eqn: Any) -> bool:
        if once:
            return str(eqn.source_info.name_stack) == "gather" and eqn.primitive.name in ("scan", "custom_vjp_call")
        return eqn.primitive.name == "name" and eqn.params["name"] == "weight"

    traced = {
        eqn.outvars[0].aval for eqn in equations(made.train_step.trace(made.state, made.batch).jaxpr.jaxpr) if is_gathered(eqn)
    }
    # The head is transposed before it is gathered.
    assert {(*sorted(r.local_shape), r.dtype) for r in rows} == {
        (*sorted(a.shape), shardings.SHORT[str(a.dtype)]) for a in traced
    }
    assert not {"all_gather", "reduce_scatter"} & {r.name for r in found.filter(kind="activation")}


def test_gathered_weights_of_all_layers_are_held_where_the_backward_pass_finds_them():
    found = table({"mesh.fsdp": 2, "sharding.gather": "forward", "remat.policy": "full"})
    assert {(r.copies, r.saved) for r in found.filter(kind="gathered", name="layers.mlp.*")} == {(4, "keep")}
    assert found.row("head", "gathered").copies == 1


def test_gradients_leave_the_step_like_this():
    run = tiny({"mesh.fsdp": 4, "mesh.tensor": 2, "dtypes.grads": "bf16", "train.freeze": "layers.attention.wq"})
    made = program(run)
    given = []
    for eqn in equations(made.train_step.trace(made.state, made.batch).jaxpr.jaxpr):
        if eqn.primitive.name == "shard_map":
            for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                given.append((v.aval.shape, str(v.aval.dtype), spec))
    rows = of(run).filter(kind="gradient").entries
    assert [(r.shape, "bfloat16", r.spec) for r in rows] == [g for g in given if g[0]]
    assert {r.name for r in of(run).filter(kind="parameter")} - {r.name for r in rows} == {"layers.attention.wq"}


@pytest.mark.parametrize("policy", ["full", "attention", "custom"])
def test_what_is_kept_is_what_the_policy_names(policy):
    run = tiny({"remat.policy": policy, "remat.tensors": "q=keep,mlp_up=keep" if policy == "custom" else ""})
    rows = of(run).filter(kind="activation")
    kept = {r.name for r in rows.filter(saved="keep")}
    assert kept == (activations.kept(run.remat) & {r.name for r in rows}) | {shardings.LAYER_INPUT}
    assert {r.copies for r in rows.filter(saved="keep")} == {run.model.num_layers}
    assert {r.copies for r in rows.filter(saved="recompute")} == {1}


def test_arrays_kept_without_a_name_are_found():
    """The policy `dots` saves the outputs of matmuls. Queries and keys are saved before rotary, so they are not the named q and
    k.
    """
    rows = table({"remat.policy": "dots"}).filter(saved="keep")
    products = [r for r in rows if r.name.endswith("dot_general")]
    found = {r.local_shape[1:]: r.copies for r in products}
    assert found == {(8, 8): 4, (4, 8): 2 * 4, (64,): 4, (96,): 2 * 4}  # equal arrays share a row
    assert {(r.axes, r.shape, r.total_bytes, r.replicas) for r in products} == {(None, None, None, None)}


def test_layers_under_one_checkpoint_keep_one_input():
    assert table({"remat.policy": "full", "remat.every": 2}).row(shardings.LAYER_INPUT).copies == 2
    assert table({"remat.policy": "full"}).row(shardings.LAYER_INPUT).copies == 4
    assert table({"remat.policy": "full", "parallel.scan_layers": False}).row(shardings.LAYER_INPUT).copies == 4


def test_offloaded_activations_take_no_device_memory():
    three = {"model": {"num_layers": 3}}
    found = jaxtrain.shardings(CONFIG, "h200:8", remat={"policy": "custom", "tensors": "q=keep,mlp_up=offload"}, **three)
    up, q = found.row("mlp_up"), found.row("q")
    assert (up.saved, up.copies, up.held_bytes) == ("offload", 2, 0)
    # The last layer's backward pass comes at once.
    assert [(r.saved, r.copies) for r in found.filter(name="mlp_up")] == [("offload", 2), ("keep", 1)]
    assert (q.saved, q.copies, q.held_bytes) == ("keep", 3, 3 * 8192 * 4096 * 2)
    assert "2 x 224.0 MiB on the host" in repr(found) and "2 x 224.0 MiB on the host" in repr(found.table())


def test_llama3_8b_by_hand():
    """Bytes expected by hand, for two layers: float32 weights and two moments over 8 GPUs, and one sequence of 8192 tokens a
    GPU and microbatch.
    """
    found = jaxtrain.shardings(CONFIG, "h200:8", **FEW)
    parameters = 8_030_261_248 - 30 * 218_112_000
    assert sum(r.total_bytes or 0 for r in found.filter(kind="parameter")) == 4 * parameters
    assert sum(r.held_bytes for r in found.filter(kind="parameter")) == 4 * parameters // 8
    assert sum(r.held_bytes for r in found.filter(kind="moment")) == 2 * 4 * parameters // 8
    assert found.row("mlp_gate").bytes_per_device == 8192 * 14336 * 2
    assert found.row("mlp_gate").held_bytes == 2 * 8192 * 14336 * 2
    # cuDNN stores a log-sum-exp for each of max_segments documents.
    lse = found.row("attention_lse")
    assert lse.local_shape[0] >= 32 and lse.local_shape[1:] == (32, 8192)
    assert lse.shape == (8 * lse.local_shape[0], 32, 8192)
    assert found.row("tokens").shape == (32, 8, 8192)
    assert not [r for r in found if r.shape is None]


def test_tensor_parallel_halves_what_a_device_holds_of_a_product():
    found = jaxtrain.shardings(CONFIG, "h200:8", mesh={"fsdp": 4, "tensor": 2}, **FEW)
    lse = found.row("attention_lse")
    assert lse.local_shape[1:] == (16, 8192) and lse.shape == (4 * lse.local_shape[0], 32, 8192)
    assert (lse.mesh_axes, lse.replicas) == ((("fsdp",), ("tensor",), ()), 1)
    assert found.row("mlp_gate").local_shape == (2, 8192, 7168)
    assert found.row("residual").local_shape == (2, 4096, 4096)


def test_filters():
    found = table({"mesh.fsdp": 4, "mesh.tensor": 2, "remat.policy": "full"})
    assert {r.kind for r in found.filter(name="mlp", kind="parameter")} == {"parameter"}
    assert {r.name for r in found.filter(name="mlp*", kind="activation")} == {"mlp_norm", "mlp_gate", "mlp_up", "mlp_down"}
    assert all("tensor" in str(r.spec) for r in found.filter(axis="tensor"))
    assert {r.name for r in found.filter(axis="vocab", kind="parameter")} == {"embed.embedding", "head"}
    assert {r.name for r in found.filter(replicas=8)} == {"count", *(r.name for r in found if r.spec == P(None))}
    assert len(found.filter()) == len(found)
    assert parse_filter("kind=activation, mlp,replicas=2") == {"kind": "activation", "name": "mlp", "replicas": 2}


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: table({"mesh.fsdp": 8}).filter(kind="params"), "Did you mean parameter"),
        (lambda: table({"mesh.fsdp": 8}).filter(axis="tensr"), "Did you mean tensor"),
        (lambda: table({"mesh.fsdp": 8}).filter(saved="kept"), "Did you mean keep"),
        (lambda: table({"mesh.fsdp": 8}).row("layers.mlp.gates"), r"Did you mean layers.mlp.gate\?"),
        (lambda: parse_filter("nam=x"), "cannot filter by 'nam'. Did you mean name"),
        (lambda: parse_filter("replicas=many"), "must be a number of devices"),
        (
            lambda: jaxtrain.shardings(CONFIG, "h200:8", mesh={"tensr": 2}),
            "mesh.tensr = '2': no such key. Did you mean mesh.tensor",
        ),
        (lambda: jaxtrain.shardings("configs/none.py", "h200:8"), "no such file"),
        (lambda: jaxtrain.shardings(CONFIG, "h900:8"), "h900"),
        (lambda: jaxtrain.shardings(CONFIG, "h200:8", mesh={"fsdp": 3}), "the run has 8 NVIDIA H200 devices"),
        (
            lambda: jaxtrain.shardings(CONFIG, "h200:8", sharding={"rules": {"vocab": "fsdp"}}),
            "sharding.rules.vocab = .fsdp.: cannot be sharded over mesh axis",
        ),
        (lambda: jaxtrain.shardings(tiny(), "h200:8", mesh={"fsdp": 1}), "dataclasses.replace"),
    ],
)
def test_what_cannot_be_is_refused(ask, words):
    with pytest.raises((ConfigError, TopologyError, LayoutError, TypeError), match=words):
        ask()


def test_table_in_a_terminal_and_a_notebook():
    found = table({"mesh.fsdp": 4, "mesh.tensor": 2}).filter(name="layers.mlp.gate")
    for cell in ("layers.mlp.gate", "layers, embed→fsdp, mlp→tensor", "f32[4,64,96]", "5 arrays"):
        assert cell in repr(found.table()) and cell in found.table()._repr_html_()
    assert repr(found).startswith("llama, 4 layers")
    first = found.rows()[0]
    assert first["name"] == found.entries[0].name and first["spec"] == str(found.entries[0].spec)
    assert "sharding" not in first and {"shape", "axes", "mesh_axes", "bytes_per_device", "replicas"} <= set(first)


def test_print_shardings(monkeypatch):
    monkeypatch.setattr(shardings, "describe", lambda run, devices: of(run))
    run = tiny({"mesh.fsdp": 8})
    console = Console(width=200, record=True, file=io.StringIO())
    print_shardings(run, devices_of(run), "kind=parameter,mlp", console)
    text = console.export_text()
    assert "layers.mlp.down" in text and "attention" not in text and "held by a device" in text
    with pytest.raises(ConfigError, match="--shardings"):
        print_shardings(run, devices_of(run), "colour=red", console)


def test_changes_name_what_moved():
    before, after = table({"mesh.fsdp": 8}), table({"mesh.fsdp": 4, "mesh.tensor": 2})
    columns = [column.cells for column in changes(before, after).columns]
    moved = {row[:2]: row[2:] for row in zip(*columns, strict=True)}
    assert moved["layers.mlp.gate", "parameter"][:2] == ("layers, embed→fsdp, mlp", "layers, embed→fsdp, mlp→tensor")
    assert ("count", "counter") not in moved
    assert not changes(before, before).columns[0].cells


def test_load_reads_sections_and_dotted_keys():
    run = jaxtrain.load(
        CONFIG + ":half", mesh={"fsdp": 4, "tensor": 2}, precision="f32", **{"optimizer.lr": 1e-4, "log.tensorboard": False}
    )
    assert (run.mesh.fsdp, run.mesh.tensor, run.precision, run.model.num_layers) == (4, 2, "f32", 16)
    assert run.optimizer.lr == 1e-4 and run.log.tensorboard is False


def test_rows_of_experts_and_heads_of_ulysses_are_each_devices_own():
    """No sharding relates the devices' shards of these arrays, so the table has the shape of one device's shard alone."""
    gate = table({"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, **EXPERTS}).row("mlp_gate")
    out = table({"mesh.seq": 2, "mesh.fsdp": 2, "parallel.context": "ulysses"}).row("attention_out")
    assert (len(gate.local_shape), gate.local_shape[1]) == (2, 48) and out.local_shape == (8, 64, 4, 8)
    for row in (gate, out):
        assert (row.shape, row.axes, row.spec, row.total_bytes, row.layout) == (None, None, None, None, "each device's own")
        assert row.held_bytes == row.copies * 4 * math.prod(row.local_shape)
        with pytest.raises(ValueError, match="each device's shard is its own"):
            row.draw()


def test_sums_name_the_arrays_without_a_global_shape():
    found = table({"mesh.fsdp": 2, "remat.policy": "dots"}).filter(kind="activation", saved="keep")
    (kind, count, total, held) = (column.cells[0] for column in found.sums().columns)
    assert (kind, count, held) == ("activation, keep", "5", "3.50 MiB")
    assert total == "1.00 MiB without 4 of each device's own" and "f32[?]" in repr(found)  # the layers' inputs alone


@pytest.mark.parametrize(
    ("name", "drawn", "holders"),
    [
        ("layers.mlp.gate", "embed 64 down, mlp 96 across", [["0,4", "1,5"], ["2,6", "3,7"]]),
        ("q", "batch 16 down, heads 8 across", [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]),
        ("final_norm.scale", "embed 64 across", [["0,1,4,5", "2,3,6,7"]]),
    ],
)
def test_a_drawing_shows_every_device(name: str, drawn: str, holders: list[list[str]]):
    picture = table(THREE)[name].draw()
    assert drawn in picture.title and [[",".join(map(str, ids)) for ids in row] for row in picture.holders] == holders
    lines = [line for line in repr(picture).splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == holders
    svg = ET.fromstring(picture._repr_svg_())
    cells = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert cells == [picture.title, *(cell for row in holders for cell in row)]


def test_a_drawing_shortens_many_devices():
    found = jaxtrain.shardings(
        CONFIG, "h200:8x2", mesh={"data": 2, "fsdp": 8}, train={"global_batch": 16, "grad_accum": 1}, **FEW
    )
    assert "0-15" in repr(found["layers.attention_norm.scale"].draw()) or "0,8" in repr(found["layers.mlp.gate"].draw())


def test_a_drawing_names_a_third_sharded_dimension():
    sharding = jax.sharding.NamedSharding(program(tiny(THREE)).placement.mesh, P("data", "fsdp", "tensor"))
    picture = Row("x", "parameter", (1, 2, 3), "f32", 24, ("layers", None, "mlp"), sharding).draw()
    assert (
        picture.note == "not drawn: layers over data" and picture.note in repr(picture) and picture.note in picture._repr_svg_()
    )
    with pytest.raises(ValueError, match="count: a single number"):
        table(THREE)["count"].draw()


def test_types_name_the_mesh_axes():
    found = table({"mesh.fsdp": 4, "mesh.tensor": 2})
    assert found["layers.mlp.gate"].type == "f32[4, 64@fsdp, 96@tensor]"
    assert found["count"].type == "i32[]"
    assert "f32[4, 64@fsdp, 96@tensor]" in repr(found) and "layers.mlp.gate" in repr(found)
    page = ET.fromstring(f"<div>{found._repr_html_().replace('<details open>', '<details>')}</div>")
    assert {"layers", "mlp"} <= {(s.text or "").partition(":")[0] for s in page.iter("summary")}
    assert len(list(page.iter("b"))) == len(found) + 1  # a type for each array, and the title


def test_a_pytree_of_arrays_has_a_table():
    mesh = program(tiny({"mesh.fsdp": 4, "mesh.tensor": 2})).placement.mesh
    placed = jax.device_put(np.zeros((8, 6), np.float32), jax.sharding.NamedSharding(mesh, P("fsdp", "tensor")))
    found = of_tree({"layer": {"w": placed}, "step": jax.numpy.zeros((), jax.numpy.int32)})
    assert found["layer.w"].type == "f32[8@fsdp, 6@tensor]" and found["layer.w"].bytes_per_device == 2 * 3 * 4
    assert found["step"].type == "i32[]" and found["layer.w"].replicas == 1
    assert jaxtrain.shardings({"w": placed})["w"].type == found["layer.w"].type
    with pytest.raises(TypeError, match="x: ndarray without a NamedSharding"):
        of_tree({"x": np.zeros(3)})


def test_tables_become_data_frames():
    found = table({"mesh.fsdp": 8})
    frame = found.to_pandas()
    assert list(frame["name"]) == [row.name for row in found] and frame["bytes_per_device"].sum() > 0
    assert repr(found.diff(table({"mesh.fsdp": 4, "mesh.tensor": 2}))) == repr(
        changes(found, table({"mesh.fsdp": 4, "mesh.tensor": 2}))
    )


def test_a_thousand_gpus():
    found = jaxtrain.shardings(
        CONFIG, "h200:8x128", mesh={"data": 128, "fsdp": 8}, train={"global_batch": 1024, "grad_accum": 1}, **FEW
    )
    gate = found.row("layers.mlp.gate")
    assert gate.shape is not None and gate.replicas == 128 and gate.bytes_per_device == 4 * math.prod(gate.shape) // 8
