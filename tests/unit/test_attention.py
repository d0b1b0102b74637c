"""The table of attention kernels: which cases each supports, which one is chosen and why; cuDNN and Pallas without a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import ConfigError
from jaxtrain.kernels.attention import KERNEL, Hardware, Rows, Spec, cudnn, pallas
from jaxtrain.kernels.attention.support import choose_attention
from jaxtrain.plan import topology

CPU, A100, H100, T4 = Hardware("cpu"), Hardware("gpu", (8, 0)), Hardware("gpu", (9, 0)), Hardware("gpu", (7, 5))
B200 = Hardware("gpu", (10, 0))
BF16 = Spec(head_dim=128, dtype="bf16", packed=True, max_segments=32)
PRIVATE = (
    "jax changed the private cuDNN module that jaxtrain/kernels/attention/cudnn.py binds: compare it with "
    "jax/_src/cudnn/fused_attention_stablehlo.py of this jax before training on a GPU"
)


# ---- Supported cases


CANNOT = [
    ("cudnn", {}, CPU),
    ("cudnn", {}, T4),
    ("cudnn", {}, A100),  # packed documents
    ("cudnn", {"dtype": "f32"}, H100),
    ("cudnn", {"head_dim": 100}, H100),
    ("cudnn", {"head_dim": 512}, H100),
    ("cudnn", {"softcap": 1.0}, H100),
    ("cudnn", {"deterministic": True}, H100),
    ("cudnn", {"fp8": KERNEL, "head_dim": 256}, H100),
    ("cudnn", {"fp8": KERNEL}, B200),
    ("pallas", {}, CPU),
    ("pallas", {}, A100),
    ("pallas", {}, B200),
    ("pallas", {"dtype": "f32"}, H100),
    ("pallas", {"head_dim": 264}, H100),
    ("pallas", {"cached": True}, H100),
]


@pytest.mark.parametrize(("name", "changes", "hardware"), CANNOT)
def test_a_kernel_that_cannot_is_refused_by_name(name, changes, hardware):
    with pytest.raises(ConfigError) as error:
        choose_attention(name, [(dataclasses.replace(BF16, **changes), 4096)], hardware)
    assert error.value.problems[0].key == ("attention.forward" if "fp8" in changes else "attention.impl")


@pytest.mark.parametrize(
    ("changes", "hardware", "seq_len", "taken"),
    [
        ({}, CPU, 256, "reference"),
        ({}, CPU, 8192, "chunked"),
        ({}, H100, 8192, "cudnn"),
        ({"fp8": KERNEL}, H100, 8192, "cudnn"),
        ({}, A100, 8192, "chunked"),
        ({}, B200, 8192, "cudnn"),
        ({"softcap": 30.0}, B200, 8192, "chunked"),
        ({"packed": False}, A100, 8192, "cudnn"),
        ({"softcap": 30.0}, H100, 8192, "pallas"),
        ({"deterministic": True}, H100, 8192, "pallas"),
        ({"deterministic": True, "packed": False}, H100, 8192, "cudnn"),
        ({"dtype": "f32"}, H100, 8192, "chunked"),
        ({}, T4, 4096, "chunked"),
        ({"cached": True}, H100, 1, "reference"),
    ],
)
def test_auto_takes_the_first_that_can(changes, hardware, seq_len, taken):
    assert choose_attention("auto", [(dataclasses.replace(BF16, **changes), seq_len)], hardware)[0] == taken


# ---- cuDNN, as far as it can be tested without a GPU


@pytest.mark.parametrize("asked", [dataclasses.replace(BF16, window=64), dataclasses.replace(BF16, packed=False)])
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


@pytest.mark.parametrize(
    ("shape", "part", "gib"),
    [
        ((1, 8192, 8192, 32, 8, 128, 33), (1, 8), (8.28, 2.07)),  # llama3_8b
        # a smaller part: llama3_8b:long: with fewer query heads in a part, a part would not fill the GPU
        ((2, 8192, 8192, 32, 8, 128, 257), (1, 4), (129.0, 8.06)),
        # fewer queries: llama3_8b:1m: one query head, a part of its group
        ((2, 65536, 65536, 32, 8, 128, 65), (1, 1), (261.02, 2.05)),
        ((1, 8192, 8192, 32, 8, 128, 1), (1, 32), (0.25, 0.25)),  # rows that are not packed
        ((1, 512, 512, 4, 2, 128, 3000), (1, 4), (5.88, 5.88)),  # too few tiles already
    ],
)
def test_parts_are_the_fewest_whose_workspace_is_small_and_which_fill_the_gpu(shape, part, gib):
    B, T, S, N, K, H, documents = shape
    assert cudnn.backward_chunk(*shape) == part
    rows, heads = part
    whole = cudnn.workspace_bytes(B * documents, T, S, N, K, H)
    smaller = cudnn.workspace_bytes(rows * documents, T, S, heads, max(1, heads * K // N), H)
    assert [round(x / 2**30, 2) for x in (whole, smaller)] == list(gib)


def test_pallas_kernels_lower_for_a_gpu():
    """The kernels lower to Mosaic GPU's custom calls ahead of time, for H200s. The number of tokens is no multiple of a tile;
    rows and heads are sharded as in models.
    """
    asked, tokens = dataclasses.replace(BF16, head_dim=96, window=77, softcap=3.0), 130
    mesh = Mesh(np.array(topology.devices(topology.parse_topology("h200:8"))).reshape(4, 2), ("data", "tensor"))
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
        assert f"{pallas.PREFIX}{kernel}_window77" in text
