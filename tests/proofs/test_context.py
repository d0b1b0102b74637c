"""A sequence over several devices: attention is that of one device, whatever the kernel, the method and the documents."""

import dataclasses

import cudnn_emulator
import helpers
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.context import Context, make_context, pairs, ulysses_problem
from jaxtrain.hardware import Devices
from jaxtrain.kernels import context
from jaxtrain.kernels.attention import Rows, Spec, Unsupported, cudnn, reference
from jaxtrain.kernels.context import ring, window
from jaxtrain.kernels.context.split import Split
from jaxtrain.step import place_batch
from jaxtrain.validate import validate_step

B, T, H = 2, 64, 8
WAYS = {
    "ring 2": Context(1, 2),
    "ring 4": Context(1, 4),
    "ring 8": Context(1, 8),
    "gather 4": Context(1, 4, gathered=True),
    "ulysses 4": Context(4, 1),
    "ulysses 8": Context(8, 1),
    "ulysses 2 x ring 2": Context(2, 2),
    "ulysses 2 x gather 4": Context(2, 4, gathered=True),
}
# Where documents begin. The first row: shorter than a chunk, across a border, one token, across several chunks.
DOCUMENTS = ([0, 5, 30, 31], [0, 20, 60])
PADDED = 3  # tokens at the end of the second row
CASES = {
    "one document": Spec(H, "f32", False, 1),
    "one document, window": Spec(H, "f32", False, 1, window=11),
    "packed": Spec(H, "f32", True, 6),
    "packed, window within a chunk": Spec(H, "f32", True, 6, window=5),
    "packed, window over several chunks": Spec(H, "f32", True, 6, window=40),
}


def make_rows(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    if spec.packed:
        for row, starts in enumerate(DOCUMENTS):
            for number, start in enumerate(starts):
                segments[row, start:], positions[row, start:] = number + 1, np.arange(T - start)
        segments[1, -PADDED:], positions[1, -PADDED:] = 0, 0
    return segments, positions


def ordered(x: np.ndarray, way: Context) -> np.ndarray:
    order = list(way.chunks)
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)


def compare(way: Context, spec: Spec, kernel: str, heads: int = 8, kv_heads: int = 8) -> float:
    """The largest difference, of output and gradients, from the definition on one device."""
    rng = np.random.default_rng(0)
    q, do = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(B, T, kv_heads, H)).astype(np.float32) for _ in range(2))
    segments, positions = make_rows(spec)
    # Of padding nothing is promised but that it is finite, and nothing depends on it.
    do *= (segments > 0)[:, :, None, None]
    split = Split(way)

    def both(attention, *args):
        """Output and gradients, compiled together."""

        def run(q, k, v, do, *rows):
            out, back = jax.vjp(lambda q, k, v: attention(q, k, v, *rows), q, k, v)
            return out, *back(do)

        return [np.asarray(x) for x in jax.jit(run)(*args)]

    def spread(q, k, v, segments, positions):
        def local(q, k, v, segments, positions):
            prepared = context.prepare(Rows(segments, positions, segments, positions), spec, kernel, split)
            return context.attention(q, k, v, prepared, spec, kernel, split)

        mesh = Mesh(np.array(jax.devices()[: way.size]), ("seq",))
        tokens = P(None, "seq")
        return jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 5, out_specs=tokens, check_vma=False)(
            q, k, v, segments, positions
        )

    def definition(q, k, v, segments, positions):
        return reference.attention(q, k, v, Rows(segments, positions, segments, positions), spec)

    arrays = (q, k, v, do, segments, positions)
    real = ordered(segments, way)[:, :, None, None] > 0
    worst = 0.0
    for a, b in zip(both(spread, *(ordered(x, way) for x in arrays)), both(definition, *arrays), strict=True):
        assert np.isfinite(a).all()
        worst = max(worst, float(np.abs(np.where(real, a - ordered(b, way), 0.0)).max()))
    return worst


TOLERANCE = 1e-5  # f32, of sums of a few dozen terms near 1


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's primitives by their definition, and blocks that do not divide a chunk."""
    monkeypatch.setattr(cudnn, "fused", cudnn_emulator.MODULE)
    monkeypatch.setattr("jaxtrain.kernels.attention.chunked.BLOCK", 5)


@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, marks=() if way == "ring 4" or case == "packed" else pytest.mark.more)
        for way in ("ring 4", "ulysses 2 x ring 2")
        for case in CASES
    ],
)
def test_cudnn_over_several_devices_is_attention(way, case):
    """What is given to cuDNN and made of its results. (That the kernel does what is taken of it is checked on a GPU.)"""
    assert compare(WAYS[way], CASES[case], "cudnn", 8, 4) < TOLERANCE


def test_backward_in_parts_over_a_ring(monkeypatch):
    """Each block by the heads of one key/value head, and each row alone."""
    monkeypatch.setattr(cudnn, "part_of", lambda B, T, S, N, K, H, documents, **how: (1, N // K))
    assert compare(WAYS["ring 4"], CASES["packed"], "cudnn", 8, 4) < TOLERANCE


@pytest.mark.parametrize("kernel", ["reference", "chunked", "cudnn"])
@pytest.mark.parametrize("way", ["ring 2", "gather 4", "ulysses 4"])
def test_every_kernel_over_several_devices(way, kernel):
    assert compare(WAYS[way], CASES["packed"], kernel, 8, 4) < TOLERANCE


@pytest.mark.parametrize("way", helpers.few(("ring 8", "ulysses 8", "ulysses 2 x gather 4"), "ulysses 2 x gather 4"))
def test_eight_devices(way):
    assert compare(WAYS[way], CASES["packed"], "reference") < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("way", ["ring 2", "ulysses 4"])
def test_grouped_queries(way, kv_heads):
    """Also with fewer key/value heads than ranks, which are then held by several."""
    assert compare(WAYS[way], CASES["packed"], "reference", 8, kv_heads) < TOLERANCE


def test_soft_cap_goes_round_the_ring():
    assert compare(WAYS["ring 4"], dataclasses.replace(CASES["packed"], softcap=1.5), "chunked", 8, 2) < TOLERANCE


def _forgotten(one, other):
    return one


def _out_of_turn(state_of):
    def earlier(distance, split):
        return ~state_of(distance, split)

    return earlier


@pytest.mark.parametrize(
    ("part", "broken"),
    [("merge", _forgotten), ("_earlier", _out_of_turn(ring._earlier))],
    ids=["a block's log-sum-exp is dropped", "places before and after are exchanged"],
)
def test_a_broken_ring_is_noticed(part, broken, monkeypatch):
    monkeypatch.setattr(ring, part, broken)
    assert compare(WAYS["ring 4"], CASES["packed"], "reference") > 100 * TOLERANCE


def test_a_wrong_neighbour_is_noticed(monkeypatch):
    """Chunks before, taken from one place too far."""
    before = window._before
    monkeypatch.setattr(window, "_before", lambda early, late, split: before(*before(early, late, split), split))
    assert compare(WAYS["ring 4"], CASES["packed, window within a chunk"], "reference") > 100 * TOLERANCE


def test_gradients_that_return_to_the_wrong_place_are_noticed(monkeypatch):
    returned = ring._returned
    monkeypatch.setattr(ring, "_returned", lambda parts, split: returned(parts[::-1], split))
    assert compare(WAYS["gather 4"], CASES["packed"], "reference") > 100 * TOLERANCE


def test_blocks_whose_offsets_do_not_fit_are_refused():
    """Nothing is computed: shapes are enough."""
    q, rows = jax.ShapeDtypeStruct((2, 1 << 19, 32, 128), "bfloat16"), jax.ShapeDtypeStruct((2, 1 << 19), "int32")
    spec = Spec(128, "bf16", True, 4)

    def run(q, rows):
        described = cudnn.describe_block(Rows(rows, rows, rows, rows), spec, True)
        return cudnn.block_forward(q, q, q, described, spec, True)

    with pytest.raises(Unsupported, match="mesh.seq higher"):
        jax.eval_shape(run, q, rows)


# ---- Order and balance


@pytest.mark.parametrize("places", [1, 2, 3, 8])
def test_zigzag_order_holds_every_chunk_once(places):
    way = Context(1, places)
    assert sorted(way.chunks) == list(range(max(1, 2 * places) if places > 1 else 1))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_have_the_same_work(way):
    work = pairs(WAYS[way], 1 << 16)
    assert len(work) == WAYS[way].size
    assert max(work) == min(work)
    assert sum(work) == pytest.approx((1 << 32) / 2)


def test_text_order_would_not_be_balanced():
    """What the order is for: the last of eight equal parts of a row has fifteen times the pairs of the first."""
    share = 1 / 8
    first, last = share**2 / 2, share * 7 * share + share**2 / 2
    assert last / first == pytest.approx(15)


def test_the_door_orders_all_arrays_alike():
    run = helpers.tiny({"mesh.seq": 4})
    made = helpers.program(run)
    host = helpers.host_batch(run, 0)
    placed = place_batch(host, made.batch, made.context)
    assert made.context == Context(1, 4)
    for key, array in host.items():
        np.testing.assert_array_equal(np.asarray(placed[key])[0], ordered(array, made.context), err_msg=key)
    chunk = run.data.seq_len // 8
    shard = {s.device.id: np.asarray(s.data)[0] for s in placed["tokens"].addressable_shards}
    np.testing.assert_array_equal(shard[1][:, :chunk], host["tokens"][:, chunk : 2 * chunk])
    np.testing.assert_array_equal(shard[1][:, chunk:], host["tokens"][:, 6 * chunk : 7 * chunk])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("ring", 0, 8, 8, 8), Context(1, 8)),
        (("gather", 0, 8, 8, 8), Context(1, 8, gathered=True)),
        (("ulysses", 0, 8, 32, 8), Context(8, 1)),
        (("ulysses", 0, 8, 4, 2), Context(4, 2)),
        (("ulysses", 0, 8, 32, 1), Context(8, 1)),
        (("ulysses", 2, 8, 32, 8), Context(2, 4)),
        (("ulysses", 0, 6, 9, 9), Context(3, 2)),
        (("ring", 0, 1, 8, 8), Context()),
    ],
)
def test_how_ranks_are_divided(asked, expected):
    assert make_context(*asked) == expected


def test_heads_that_do_not_divide_are_named():
    assert ulysses_problem(4, 6, 6) == "6 query heads do not divide over 4 ranks"
    assert "2 key/value heads" not in (ulysses_problem(4, 8, 2) or "")
    assert "3 key/value heads neither divide over 2 ranks" in (ulysses_problem(2, 6, 3) or "")


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"mesh.seq": 4, "data.seq_len": 60}, "data.seq_len", "4 places of a ring"),
        ({"mesh.seq": 4, "attention.ulysses": 2}, "attention.ulysses", "only with attention.context = ulysses"),
        ({"mesh.seq": 4, "attention.context": "ulysses", "attention.ulysses": 3}, "attention.ulysses", "Set one of 1, 2, 4"),
        ({"mesh.seq": 2, "attention.context": "rings"}, "attention.context", "ring"),
        ({"mesh.seq": 2, "sharding.rules.sequence": "tensor", "mesh.tensor": 2}, "sharding.rules.sequence", "'seq' only"),
        ({"mesh.seq": 2, "mesh.tensor": 2, "sharding.rules.residual": "tensor+seq"}, "sharding.rules.residual", "seq+tensor"),
        ({"mesh.seq": 2, "mesh.fsdp": 2, "sharding.rules.embed": "seq+fsdp"}, "sharding.rules.embed", "fsdp+seq"),
        ({"mesh.seq": 8, "attention.context": "ulysses", "data.seq_len": 60}, "data.seq_len", "not divide over 8 ranks"),
        ({"mesh.data": 2, "mesh.fsdp": 2, "sharding.rules.embed": "data"}, "sharding.rules.embed", "last axes of"),
        ({"mesh.data": 2, "mesh.fsdp": 2, "sharding.rules.batch": "fsdp+data"}, "sharding.rules.embed", "not the last of"),
        ({"mesh.tensor": 8, "model.num_kv_heads": 3, "model.num_heads": 24}, "model.num_kv_heads", "does not divide"),
    ],
)
def test_what_cannot_be_is_refused(changes, key, says):
    run = helpers.tiny({"mesh.data": 1, **changes})
    count = int(np.prod([max(1, getattr(run.mesh, a)) for a in ("data", "fsdp", "tensor", "seq")]))
    problems = validate_step(run, Devices("cpu", "cpu", count, 0.0, "a test"))
    found = [p for p in problems if p.key == key]
    assert len(found) == 1 or (found and key.startswith("sharding")), [str(p) for p in problems]
    assert says in str(found[0])
