"""The table of a run's layout, compared with allocated and computed arrays, and with counts by hand."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import devices_of, program, start, tiny
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import jaxtrain
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.kernels.experts import routing
from jaxtrain.models import activations
from jaxtrain.plan import shardings
from jaxtrain.plan.topology import TopologyError
from jaxtrain.report.shardings import Shardings, run_shardings, tree_shardings

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "llama3_8b.py")
FEW = {"model": {"num_layers": 2}}
THREE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
TWO = {"mesh.fsdp": 4, "mesh.tensor": 2}


@functools.cache
def of(run: RunConfig) -> Shardings:
    """Return the table of a run's shardings on fake devices."""
    return run_shardings(run, devices_of(run))


def table(overrides: dict[str, Any]) -> Shardings:
    return of(tiny(overrides))


def test_rows_say_what_is_allocated():
    """Shapes, bytes and copies of parameters and moments match the arrays of a real state on 8 devices."""
    run = tiny(THREE)
    state = start(program(run))
    rows = [r for r in of(run) if r.kind in ("parameter", "moment", "counter")]
    arrays = jax.tree.leaves((state.params, state.optimizer))
    assert len(rows) == len(arrays)
    for row, a in zip(rows, arrays, strict=True):
        parts = [str(s.index) for s in a.addressable_shards]
        assert (row.shape, row.local_shape) == (a.shape, a.addressable_shards[0].data.shape), row.name
        assert row.bytes_per_device == a.addressable_shards[0].data.nbytes and row.total_bytes == a.nbytes
        assert row.replicas == parts.count(parts[0])
        assert row.sharding is not None and row.sharding.is_equivalent_to(a.sharding, a.ndim)


LATENT = {
    "model.num_kv_heads": 8,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 24,
    "model.v_head_dim": 12,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 8,
}
FEW_EXPERTS = {"model.family": "mixtral", "model.num_experts": 4, "mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}
STREAM = ("layer_input", "attention_norm", "attention_proj", "residual", "mlp_norm", "mlp_down")
SHAPES = {
    "dense": (TWO, {"q": (8, 8), "k": (4, 8), "v": (4, 8), "attention_out": (8, 8), "mlp_gate": (96,), "mlp_up": (96,)}),
    "latent": (
        TWO | LATENT,
        {
            "q_latent": (24,),
            "kv_latent": (16 + 8,),
            "q": (8, 16),
            "k": (8, 16),
            "v": (8, 12),
            "attention_out": (8, 12),
            "mlp_gate": (96,),
            "mlp_up": (96,),
        },
    ),
    "experts": (FEW_EXPERTS, {"q": (8, 8), "k": (4, 8), "v": (4, 8), "attention_out": (8, 8), "expert_choice": (2,)}),
}


@pytest.mark.parametrize(("overrides", "of_tokens"), SHAPES.values(), ids=SHAPES)
def test_activations_are_sharded_as_the_table_says(overrides, of_tokens):
    """A device's shards, as traced, and the axes that shard them make up the activations of the whole batch."""
    found = {r.name: r for r in table(overrides).filter(kind="activation") if r.name in activations.AXES and r.axes}
    wanted = {name: (16, 64, *rest) for name, rest in (of_tokens | dict.fromkeys(STREAM, (64,))).items()}
    assert {name: r.shape for name, r in found.items()} == wanted
    for row in found.values():
        assert row.sharding is not None and row.sharding.shard_shape(row.shape) == row.local_shape, row.name


def test_each_activation_has_logical_axes():
    assert {*activations.ACTIVATIONS, shardings.LAYER_INPUT, routing.CHOICE} == set(activations.AXES)


GATHERS = (
    {"mesh.fsdp": 2, "mesh.tensor": 2, "sharding.zero": 1},
    {"mesh.fsdp": 2, "sharding.zero": 2, "train.grad_accum": 2},
    FEW_EXPERTS,
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
    rows = found.filter(kind="gathered").rows
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
    short = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8"}
    assert {(*sorted(r.local_shape), r.dtype) for r in rows} == {(*sorted(a.shape), short[str(a.dtype)]) for a in traced}
    assert not {"all_gather", "reduce_scatter"} & {r.name for r in found.filter(kind="activation")}


def test_gathered_weights_of_all_layers_are_held_where_the_backward_pass_finds_them():
    found = table({"mesh.fsdp": 2, "sharding.gather": "forward", "remat.policy": "full"})
    assert {(r.copies, r.saved) for r in found.filter(kind="gathered", name="layers.mlp.*")} == {(4, "keep")}
    low = {"lora.rank": 2, "lora.base": "nf4", "model.d_ff": 128, "mesh.fsdp": 2, "sharding.gather": "forward"}
    rows = table(low | {"remat.policy": "full"}).filter(kind="gathered", name="layers.mlp.gate*").rows
    assert {r.name: (r.local_shape, r.dtype, r.copies) for r in rows} == {
        "layers.mlp.gate": ((64, 128), "f32", 4),
        "layers.mlp.gate.bits": ((32, 128), "u8", 1),
        "layers.mlp.gate.scale": ((1, 128), "u8", 1),
        "layers.mlp.gate.second": ((1,), "f32", 1),
        "layers.mlp.gate.offset": ((), "f32", 1),
    }
    assert found.filter(kind="gathered")["head"].copies == 1


def test_gradients_leave_the_step_like_this():
    run = tiny({**TWO, "dtypes.grads": "bf16", "train.freeze": "layers.attention.wq"})
    made = program(run)
    given = []
    for eqn in equations(made.train_step.trace(made.state, made.batch).jaxpr.jaxpr):
        if eqn.primitive.name == "shard_map":
            for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                given.append((v.aval.shape, str(v.aval.dtype), spec))
    rows = of(run).filter(kind="gradient").rows
    assert [(r.shape, "bfloat16", r.sharding and r.sharding.spec) for r in rows] == [g for g in given if g[0]]
    assert {r.name for r in of(run).filter(kind="parameter")} - {r.name for r in rows} == {"layers.attention.wq"}


@pytest.mark.parametrize("policy", ["full", "attention", "custom"])
def test_what_is_kept_is_what_the_policy_names(policy):
    run = tiny({"remat.policy": policy, "remat.tensors": "q=keep,mlp_up=keep" if policy == "custom" else ""})
    rows = of(run).filter(kind="activation")
    kept = [r for r in rows if r.saved == "keep"]
    assert {r.name for r in kept} == (activations.saved_activations(run.remat) & {r.name for r in rows}) | {
        shardings.LAYER_INPUT
    }
    assert {r.copies for r in kept} == {run.model.num_layers}
    assert {r.copies for r in rows if r.saved == "recompute"} == {1}


def test_arrays_kept_without_a_name_are_found():
    """The policy `dots` saves the outputs of matmuls. Queries and keys are saved before rotary, so they are not the named q and
    k.
    """
    products = table({"remat.policy": "dots"}).filter(name="*dot_general").rows
    assert {r.saved for r in products} == {"keep"}
    found = {r.local_shape[1:]: r.copies for r in products}
    assert found == {(8, 8): 4, (4, 8): 2 * 4, (64,): 4, (96,): 2 * 4}  # equal arrays share a row
    assert {(r.axes, r.shape, r.total_bytes, r.replicas) for r in products} == {(None, None, None, None)}


def test_layers_under_one_checkpoint_keep_one_input():
    assert table({"remat.policy": "full", "remat.every": 2})[shardings.LAYER_INPUT].copies == 2
    assert table({"remat.policy": "full"})[shardings.LAYER_INPUT].copies == 4
    assert table({"remat.policy": "full", "parallel.scan_layers": False})[shardings.LAYER_INPUT].copies == 4


def test_offloaded_activations_take_no_device_memory():
    three = {"model": {"num_layers": 3}}
    found = jaxtrain.shardings(CONFIG, "h200:8", remat={"policy": "custom", "tensors": "q=keep,mlp_up=offload"}, **three)
    up, q = found["mlp_up"], found["q"]
    assert (up.saved, up.copies, up.device_bytes) == ("offload", 2, 0)
    # The last layer's backward pass comes at once.
    assert [(r.saved, r.copies) for r in found.filter(name="mlp_up")] == [("offload", 2), ("keep", 1)]
    assert (q.saved, q.copies, q.device_bytes) == ("keep", 3, 3 * 8192 * 4096 * 2)


def test_llama3_8b_by_hand():
    """Bytes expected by hand, for two layers: float32 weights and two moments over 8 GPUs, and one sequence of 8192 tokens a
    GPU and microbatch.
    """
    found = jaxtrain.shardings(CONFIG, "h200:8", **FEW)
    parameters = 8_030_261_248 - 30 * 218_112_000
    assert sum(r.total_bytes or 0 for r in found.filter(kind="parameter")) == 4 * parameters
    assert sum(r.device_bytes for r in found.filter(kind="parameter")) == 4 * parameters // 8
    assert sum(r.device_bytes for r in found.filter(kind="moment")) == 2 * 4 * parameters // 8
    assert found["mlp_gate"].bytes_per_device == 8192 * 14336 * 2
    assert found["mlp_gate"].device_bytes == 2 * 8192 * 14336 * 2
    # cuDNN stores a log-sum-exp for each of max_segments documents.
    lse = found["attention_lse"]
    assert lse.local_shape[0] >= 32 and lse.local_shape[1:] == (32, 8192)
    assert lse.shape == (8 * lse.local_shape[0], 32, 8192)
    assert found["tokens"].shape == (32, 8, 8192)
    assert not [r for r in found if r.shape is None]


def test_tensor_parallel_halves_what_a_device_holds_of_a_product():
    found = jaxtrain.shardings(CONFIG, "h200:8", mesh={"fsdp": 4, "tensor": 2}, **FEW)
    lse = found["attention_lse"]
    assert lse.local_shape[1:] == (16, 8192) and lse.shape == (4 * lse.local_shape[0], 32, 8192)
    assert (lse.mesh_axes, lse.replicas) == ((("fsdp",), ("tensor",), ()), 1)
    assert found["mlp_gate"].local_shape == (2, 8192, 7168)
    assert found["residual"].local_shape == (2, 4096, 4096)


def test_rows_are_selected_by_name_and_kind():
    found = table(TWO)
    assert {r.kind for r in found.filter(name="mlp", kind="parameter")} == {"parameter"}
    assert {r.name for r in found.filter(name="mlp*", kind="activation")} >= {"mlp_norm", "mlp_gate", "mlp_up", "mlp_down"}
    for wrong, key in (({"kind": "params"}, "kind"), ({"name": "mlq"}, "name"), ({"name": "mlp", "kind": "params"}, "kind")):
        with pytest.raises(ConfigError) as error:
            found.filter(**wrong)
        assert [problem.key for problem in error.value.problems] == [key]
    with pytest.raises(ConfigError, match="layers.mlp.gate"):
        found["layers.mlp.gates"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"mesh": {"tensr": 2}}, "mesh.tensr"), ({"sharding": {"rules": {"vocab": "fsdp"}}}, "sharding.rules.vocab")],
)
def test_what_cannot_be_is_refused(changes, key):
    with pytest.raises(ConfigError, match=key):
        jaxtrain.shardings(CONFIG, "h200:8", **changes)
    with pytest.raises(TopologyError):
        jaxtrain.shardings(CONFIG, "h900:8")
    with pytest.raises(TypeError):
        jaxtrain.shardings(tiny(), "h200:8", mesh={"fsdp": 1})


def test_a_diff_names_what_moved():
    before, after = table(THREE), table(TWO)

    def moved(a: Shardings, b: Shardings) -> dict[tuple[str, ...], tuple[str, ...]]:
        rows = zip(*(column.cells for column in a.diff(b).columns), strict=True)
        return {tuple(cells[:2]): tuple(cells[2:4]) for cells in rows}

    name, _ = gate = "layers.mlp.gate", "parameter"
    assert moved(before, after)[gate] == (before[name].type, after[name].type)
    assert ("count", "counter") not in moved(before, after) and moved(before, before) == {}
    assert moved(before, before.filter(kind="counter"))[gate] == (before[name].type, "-")


def test_rows_of_experts_and_heads_of_ulysses_are_each_devices_own():
    """No sharding relates the devices' shards of these arrays, so the table has the shape of one device's shard alone."""
    of_experts, of_heads = table(FEW_EXPERTS), table({"mesh.seq": 2, "mesh.fsdp": 2, "parallel.context": "ulysses"})
    gate, out = of_experts["mlp_gate"], of_heads["attention_out"]
    assert (len(gate.local_shape), gate.local_shape[1]) == (2, 48) and out.local_shape == (8, 64, 4, 8)
    for found, row in ((of_experts, gate), (of_heads, out)):
        assert (row.shape, row.axes, row.sharding, row.total_bytes) == (None, None, None, None)
        assert row.device_bytes == row.copies * 4 * math.prod(row.local_shape)
        with pytest.raises(ValueError):
            found.draw(row.name)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("layers.mlp.gate", ["embed mlp 0:48 mlp 48:96", "0:32 0,4 1,5", "32:64 2,6 3,7"]),
        ("q", ["batch heads 0:4 heads 4:8", "0:4 0 1", "4:8 2 3", "8:12 4 5", "12:16 6 7"]),
        ("final_norm.scale", ["embed devices", "0:32 0,1,4,5", "32:64 2,3,6,7"]),
        ("count", ["devices", "all 0-7"]),
    ],
)
def test_a_picture_has_every_shard_and_its_devices(name: str, lines: list[str]):
    assert [" ".join(line.split()) for line in repr(table(THREE).draw(name)).splitlines()[1:]] == lines


def test_a_picture_has_all_sharded_dimensions():
    columns = table({"mesh.data": 2, "mesh.seq": 2, "mesh.tensor": 2}).draw("q").columns
    assert [list(column.cells) for column in columns[1:]] == [["0", "1", "4", "5"], ["2", "3", "6", "7"]]
    assert columns[0].cells == ["0:8, 0:32", "0:8, 32:64", "8:16, 0:32", "8:16, 32:64"]


def test_types_name_the_mesh_axes():
    found = table(TWO)
    assert found["layers.mlp.gate"].type == "f32[4, 64@fsdp, 96@tensor]"
    assert found["count"].type == "i32[]"


def test_all_rows_are_shown():
    """The tree as text and as HTML has each array's name, and the sums of kinds are those of the rows."""
    found = table(TWO)
    for text in (repr(found), found._repr_html_()):
        assert all(f" {r.name} " in text for r in found)
    kinds, arrays, _, _ = found.sums().columns
    assert sum(map(int, arrays.cells)) == len(found.rows) and {"parameter", "gathered", "batch"} <= {*kinds.cells}


def test_a_pytree_of_arrays_has_a_table():
    mesh = program(tiny(TWO)).placement.mesh
    placed = jax.device_put(np.zeros((8, 6), np.float32), jax.sharding.NamedSharding(mesh, P("fsdp", "tensor")))
    found = tree_shardings({"layer": {"w": placed}, "step": jax.numpy.zeros((), jax.numpy.int32)})
    assert found["layer.w"].type == "f32[8@fsdp, 6@tensor]" and found["layer.w"].bytes_per_device == 2 * 3 * 4
    assert found["step"].type == "i32[]" and found["layer.w"].replicas == 1
    assert jaxtrain.shardings({"w": placed})["w"].type == found["layer.w"].type
    frame = found.to_pandas()
    assert frame["device_bytes"].tolist() == [2 * 3 * 4, 4] and frame["name"].tolist() == ["layer.w", "step"]
    with pytest.raises(TypeError, match="x"):
        tree_shardings({"x": np.zeros(3)})
