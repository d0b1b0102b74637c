"""The table of attention kernels: which cases each supports, which one is chosen and why; cuDNN and Pallas without a GPU."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import IMPLEMENTATIONS, Hardware, Rows, Spec, choose, cudnn, implementation, pallas
from jaxtrain.plan import topology

CPU, A100, H100, T4 = Hardware("cpu"), Hardware("gpu", (8, 0)), Hardware("gpu", (9, 0)), Hardware("gpu", (7, 5))
SPEC = Spec(head_dim=8, dtype="f32", packed=True, max_segments=6)
B200 = Hardware("gpu", (10, 0))
BF16 = Spec(head_dim=128, dtype="bf16", packed=True, max_segments=32)
PRIVATE = (
    "jax changed the private cuDNN module that jaxtrain/kernels/attention/cudnn.py binds: compare it with "
    "jax/_src/cudnn/fused_attention_stablehlo.py of this jax before training on a GPU"
)


# ---- Supported cases


@pytest.mark.parametrize(
    ("name", "asked", "hardware", "reason"),
    [
        ("cudnn", BF16, CPU, "needs an NVIDIA GPU"),
        ("cudnn", BF16, T4, "8.0"),
        ("cudnn", BF16, A100, "packed documents"),
        ("cudnn", dataclasses.replace(BF16, dtype="f32"), H100, "bf16, not f32"),
        ("cudnn", dataclasses.replace(BF16, head_dim=100), H100, "multiple of 8"),
        ("cudnn", dataclasses.replace(BF16, head_dim=512), H100, "at most 256"),
        ("cudnn", dataclasses.replace(BF16, softcap=1.0), H100, "soft cap"),
        ("cudnn", dataclasses.replace(BF16, cached=True), H100, "cache"),
        ("cudnn", dataclasses.replace(BF16, deterministic=True), H100, "fixed order"),
        ("pallas", BF16, CPU, "needs a GPU"),
        ("pallas", BF16, A100, "Hopper's WGMMA .*, not 8.0"),
        ("pallas", BF16, B200, "Hopper's WGMMA .*, not 10.0"),
        ("pallas", dataclasses.replace(BF16, dtype="f32"), H100, "bf16, not f32"),
        ("pallas", dataclasses.replace(BF16, head_dim=100), H100, "multiple of 8"),
        ("pallas", dataclasses.replace(BF16, head_dim=264), H100, "at most 256"),
        ("pallas", dataclasses.replace(BF16, cached=True), H100, "cache"),
    ],
)
def test_a_kernel_that_cannot_is_refused_by_name(name, asked, hardware, reason):
    with pytest.raises(ValueError, match=reason) as error:
        choose(name, [(asked, 4096)], hardware)
    assert f"attention.impl = '{name}'" in str(error.value)
    assert "attention.impl=auto" in str(error.value)


def test_unknown_kernel():
    with pytest.raises(ValueError, match="no such kernel.*reference"):
        choose("flash", [(BF16, 4096)], H100)


@pytest.mark.parametrize(
    ("asked", "hardware", "seq_len", "taken", "because"),
    [
        (SPEC, CPU, 256, "reference", "GPU"),
        (SPEC, CPU, 8192, "chunked", "8192 x 8192"),
        (BF16, H100, 8192, "cudnn", ""),
        (BF16, A100, 8192, "chunked", "WGMMA"),
        (BF16, B200, 8192, "cudnn", ""),
        (dataclasses.replace(BF16, softcap=30.0), B200, 8192, "chunked", "WGMMA"),
        (dataclasses.replace(BF16, packed=False), A100, 8192, "cudnn", ""),
        (dataclasses.replace(BF16, softcap=30.0), H100, 8192, "pallas", "soft cap"),
        (dataclasses.replace(BF16, deterministic=True), H100, 8192, "pallas", "fixed order"),
        (dataclasses.replace(BF16, deterministic=True, packed=False), H100, 8192, "cudnn", ""),
        (dataclasses.replace(BF16, dtype="f32"), H100, 8192, "chunked", "pallas computes bf16, not f32"),
        (BF16, T4, 4096, "chunked", "8.0"),
        (dataclasses.replace(BF16, cached=True), H100, 1, "reference", "cache"),
    ],
)
def test_auto_takes_the_first_that_can_and_says_why(asked, hardware, seq_len, taken, because):
    name, why = choose("auto", [(asked, seq_len)], hardware)
    assert name == taken
    assert because in why


# ---- cuDNN, as far as it can be tested without a GPU


@pytest.mark.parametrize(
    ("segments", "max_segments", "lengths", "offsets"),
    [
        # One entry for each of max_segments documents, and one for padding.
        (
            [[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 1, 1], [1, 2, 2, 0, 0, 0]],
            4,
            [[3, 2, 1, -1, -1], [6, -1, -1, -1, -1], [1, 2, -1, -1, 3]],
            [[0, 3, 5, -1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, -1, -1, 3, -1]],
        ),
        # Exactly max_segments documents.
        ([[1, 2, 3, 3]], 3, [[1, 1, 2, -1]], [[0, 1, 2, -1, -1]]),
        # max_segments=1 still needs the entry for padding: the primitive treats rows as packed from two entries on.
        ([[1, 1, 1, 0]], 1, [[3, 1]], [[0, 3, -1]]),
    ],
)
def test_cudnn_describes_documents_by_length_and_offset(segments, max_segments, lengths, offsets):
    rows = jnp.asarray(segments, jnp.int32)
    made = cudnn.prepare(Rows(rows, rows, rows, rows), dataclasses.replace(BF16, max_segments=max_segments))
    assert made is not None
    assert (made.lengths_BM.tolist(), made.offsets_BM.tolist()) == (lengths, offsets)


def test_cudnn_unpacked_needs_nothing():
    rows = jnp.ones((1, 4), jnp.int32)
    assert cudnn.prepare(Rows(rows, rows, rows, rows), dataclasses.replace(BF16, packed=False)) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_private_cudnn_primitives_have_the_parameters_we_bind(direction):
    primitive = getattr(cudnn.fused, f"_dot_product_attention_{direction}_p_wrapper", None)
    named = f"_dot_product_attention_{direction}_"
    # The implementation lists every parameter that the primitive binds. In jax 0.11 only the abstract function lists them.
    implementation = getattr(cudnn.fused, named + "impl_wrapper", None) or getattr(cudnn.fused, named + "abstract", None)
    assert primitive is not None, PRIVATE
    assert implementation is not None, PRIVATE
    parameters = inspect.signature(implementation).parameters.values()
    q = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    bound = set(cudnn._static(q, BF16)) | ({"is_training"} if direction == "fwd" else set())
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == bound, PRIVATE
    operands = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [
        "query",
        "key",
        "value",
        "bias",
        "q_seqlen",
        "kv_seqlen",
        "q_offsets",
        "kv_offsets",
        "page_table_k",
        "page_table_v",
    ]
    expected += [] if direction == "fwd" else ["activation", "fwd_output", "grad_output"]
    assert operands == expected, PRIVATE


@pytest.mark.parametrize("asked", [BF16, dataclasses.replace(BF16, packed=False), dataclasses.replace(BF16, window=64)])
def test_private_cudnn_primitives_lower_for_a_gpu(asked):
    """The forward and backward pass lower to cuDNN's custom calls inside a manual shard_map, as in models/attention.py."""
    mesh = jax.make_mesh((8,), ("data",))
    B, T, N, K, H = 8, 256, 4, 2, 128
    split = jax.sharding.NamedSharding(mesh, P("data"))
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=split) for heads in (N, K))
    segments = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=split)

    def local(q, k, v, segments):
        prepared = cudnn.prepare(Rows(segments, segments, segments, segments), asked)
        out, back = jax.vjp(lambda *qkv: cudnn.attention(*qkv, prepared, asked), q, k, v)
        return out, *back(out)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    try:
        shapes = [a.shape for a in jax.eval_shape(f, q, k, k, segments)]
        text = f.trace(q, k, k, segments).lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:  # jax may raise anything; the message must start with PRIVATE
        raise AssertionError(f"{PRIVATE}: {error}") from error
    assert shapes == [q.shape, q.shape, k.shape, k.shape], PRIVATE
    for call in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert call in text, PRIVATE
    assert ("PADDING_CAUSAL" in text) == asked.packed, PRIVATE
    # A partitioning callback would put its address into the program, and the compile cache would never hit.
    assert "CustomSPMDPartitioning" not in text, PRIVATE


def test_cudnn_goes_backward_part_after_part():
    """A backward pass of llama3_8b is four calls of two key/value heads each. A barrier separates each call from the next."""
    q, k = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))

    def backward(q, k, v, segments):
        prepared = cudnn.prepare(Rows(segments, segments, segments, segments), BF16)
        out, back = jax.vjp(lambda *qkv: cudnn.attention(*qkv, prepared, BF16), q, k, v)
        return back(out)

    jaxpr = jax.make_jaxpr(backward)(q, k, k, jax.ShapeDtypeStruct((1, 8192), jnp.int32))
    names = ["dot_product_attention_bwd_wrapper", "optimization_barrier"]
    parts = [e for e in jaxpr.eqns if e.primitive.name in names]
    calls, barriers = parts[::2], parts[1::2]
    assert [e.primitive.name for e in parts] == [*names * 3, names[0]], PRIVATE
    assert [[x.aval.shape[2] for x in e.invars[:3]] for e in calls] == [[8, 2, 2]] * 4
    for call, barrier, behind in zip(calls, barriers, calls[1:], strict=False):
        assert set(call.outvars) <= set(barrier.invars)
        made = {x for e in jaxpr.eqns if any(x in barrier.outvars for x in e.invars) for x in e.outvars}
        assert set(behind.invars[:3]) <= made


@pytest.mark.parametrize(
    ("asked", "tokens", "mask"),
    [
        (dataclasses.replace(BF16, head_dim=96, window=77), 1000, "window77"),
        (dataclasses.replace(BF16, head_dim=256, softcap=3.0), 130, "causal"),
    ],
)
def test_pallas_kernels_lower_for_a_gpu(asked, tokens, mask):
    """The kernels lower to Mosaic GPU's custom calls ahead of time, for H200s. The number of tokens is no multiple of a tile;
    rows and heads are sharded as in models.
    """
    mesh = Mesh(np.array(topology.devices(topology.parse("h200:8"))).reshape(4, 2), ("data", "tensor"))
    rows, heads = P("data"), P("data", None, "tensor")
    q, k = (
        jax.ShapeDtypeStruct((4, tokens, n, asked.head_dim), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, heads))
        for n in (12, 4)
    )
    ids = jax.ShapeDtypeStruct((4, tokens), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, rows))

    def local(q, k, v, segments, positions):
        prepared = pallas.prepare(Rows(segments, positions, segments, positions), asked)
        out, back = jax.vjp(lambda *qkv: pallas.attention(*qkv, prepared, asked), q, k, v)
        return out, *back(out)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False))
    lowered = f.lower(q, k, k, ids, ids)
    assert [x.shape for x in lowered.out_info] == [q.shape, q.shape, k.shape, k.shape]
    text = lowered.as_text(debug_info=True)
    assert text.count("@mosaic_gpu_v2(") == 3
    for kernel in (pallas.FORWARD, pallas.QUERIES, pallas.KEYS):
        assert f"{pallas.PREFIX}{kernel}_{mask}" in text


def test_table_names_importable_modules():
    for name in IMPLEMENTATIONS:
        module = implementation(name, Spec(64, "bf16", False, 1))
        assert all(callable(getattr(module, f)) for f in ("unsupported", "prepare", "attention")), name
    assert attention.IMPLEMENTATIONS is IMPLEMENTATIONS
