"""cuDNN's lengths and offsets of packed documents, after jax's own conversion to the kernel's arguments; backward passes in
parts.
"""

from types import SimpleNamespace

import cudnn_emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxtrain.kernels.attention import Rows, Spec, cudnn


def documents(rows: list[list[int]], padding: list[int]) -> np.ndarray:
    """Return segment ids: each row has documents of these lengths, and then its number of padding tokens."""
    return np.asarray(
        [np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, pad]) for lengths, pad in zip(rows, padding, strict=True)],
        np.int32,
    )


ROWS = {  # the documents of each row, and its padding
    "one": ([12], 0),
    "two": ([5, 7], 0),
    "three": ([1, 1, 10], 0),
    "padded": ([5, 3], 4),
    "most of it padding": ([4], 8),
    "as many as there may be, padded": ([2, 2, 2, 2], 4),
    "nothing but padding": ([], 12),
}


@pytest.mark.parametrize("max_segments", [4, 7])
def test_every_document_is_where_the_kernel_is_told(max_segments):
    """Documents are counted over all rows. The kernel's entry i has document i's length, and its start in elements.

    A row's padding counts as its last document, so that the kernel leaves no output undefined.
    """
    rows, padding = (list(each) for each in zip(*ROWS.values(), strict=True))
    segments = documents(rows, padding)
    B, T = segments.shape
    N, K, H = 8, 2, 16
    spec = Spec(head_dim=H, dtype="bf16", packed=True, max_segments=max_segments)
    ids = jnp.asarray(segments)
    packed = cudnn.prepare(Rows(ids, ids, ids, ids), spec)
    assert packed is not None
    q, k = jnp.zeros((B, T, N, H)), jnp.zeros((B, T, K, H))
    lengths, offsets = packed.lengths_BM, packed.offsets_BM
    told = [np.asarray(x).ravel() for x in fused._fix_seqlen_offsets(lengths, lengths, offsets, offsets, q, k)]
    rows = [[*ls, pad] if pad else ls for ls, pad in zip(rows, padding, strict=True)]
    assert all(sum(ls) == T for ls in rows)
    expected = [(row, start) for row, ls in enumerate(rows) for start in np.cumsum([0, *ls])[:-1]]
    count = len(expected)
    assert told[0][:count].tolist() == told[1][:count].tolist() == [n for ls in rows for n in ls]
    assert not told[0][count:].any() and not told[1][count:].any()
    assert told[2][:count].tolist() == [(row * T + start) * N * H for row, start in expected]
    assert told[3][:count].tolist() == [(row * T + start) * K * H for row, start in expected]


# ---- The backward pass in parts


GIB = 1 << 30


@pytest.mark.parametrize(
    ("shape", "part", "gib"),
    [
        ((1, 8192, 8192, 32, 8, 128, 33), (1, 8), (8.28, 2.07)),  # llama3_8b
        ((1, 8192, 8192, 64, 8, 128, 33), (1, 8), (16.56, 2.07)),  # llama3_70b
        ((4, 8192, 8192, 32, 8, 64, 33), (4, 4), (16.63, 2.08)),  # llama3_1b
        # a smaller part: llama3_8b:long: with fewer query heads in a part, a part would not fill the GPU
        ((2, 8192, 8192, 32, 8, 128, 257), (1, 4), (129.0, 8.06)),
        # fewer queries: llama3_8b:1m: one query head, a part of its group
        ((2, 65536, 65536, 32, 8, 128, 65), (1, 1), (261.02, 2.05)),
        ((2, 65536, 65536, 32, 8, 128, 2), (2, 8), (8.03, 2.01)),  # the same, off the diagonal
        ((1, 8192, 8192, 32, 8, 128, 1), (1, 32), (0.25, 0.25)),  # rows that are not packed
        ((1, 8192, 8192, 32, 32, 128, 33), (1, 16), (4.16, 2.08)),  # no grouped queries
        ((1, 512, 512, 4, 2, 128, 3000), (1, 4), (5.88, 5.88)),  # too few tiles already
    ],
)
def test_parts_are_the_fewest_whose_workspace_is_small_and_which_fill_the_gpu(shape, part, gib):
    B, T, S, N, K, H, documents = shape
    assert cudnn.part_of(*shape) == part
    rows, heads = part
    whole = cudnn.workspace_bytes(B * documents, T, S, N, K, H)
    smaller = cudnn.workspace_bytes(rows * documents, T, S, heads, max(1, heads * K // N), H)
    assert [round(x / GIB, 2) for x in (whole, smaller)] == list(gib)


def gradients(q, k, v, do, segments, spec):
    """Return the gradients of attention on the whole rows, then those of two blocks of ring attention: a diagonal block, and
    one of earlier keys.
    """

    def whole(q, k, v):
        return cudnn.attention(q, k, v, cudnn.prepare(Rows(segments, segments, segments, segments), spec), spec)

    def block(diagonal):
        described = cudnn.describe_block(Rows(segments, segments, segments, segments), spec, diagonal)
        out, lse = cudnn.block_forward(q, k, v, described, spec, diagonal)
        return cudnn.block_backward(q, k, v, out, lse, do, described, spec, diagonal)

    return [*jax.vjp(whole, q, k, v)[1](do), *block(True), *block(False)]


PARTS = ((3, 4), (1, 8), (3, 2), (1, 1))  # rows, query heads
MORE = [pytest.param(packed, PARTS, marks=pytest.mark.more) for packed in (True, False)]


@pytest.mark.parametrize(("packed", "parts"), [(True, (PARTS[0], PARTS[3])), *MORE])
def test_parts_of_a_backward_pass_are_the_whole(packed, parts, monkeypatch):
    """A backward pass in parts gives the same gradients. Parts: key/value groups of heads, single rows, half of a group's query
    heads, and single heads of single rows.
    """
    monkeypatch.setattr(cudnn, "fused", cudnn_emulator.MODULE)
    segments = jnp.asarray(documents([[5, 7], [12], [1, 3, 2]], [0, 0, 6]))
    segments = segments if packed else jnp.ones_like(segments)
    spec = Spec(head_dim=4, dtype="f32", packed=packed, max_segments=4)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(at, (3, 12, n, 4)) for at, n in zip(keys, (8, 2, 2, 8), strict=True))
    want = gradients(q, k, v, do, segments, spec)

    taken = []

    def bind(part, *rest, **static):
        taken.append((part.shape[0], part.shape[2]))
        return cudnn_emulator.backward(part, *rest, **static)

    monkeypatch.setattr(cudnn, "fused", SimpleNamespace(**vars(cudnn_emulator.MODULE)))
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_p_wrapper", SimpleNamespace(bind=bind))
    for rows, heads in parts:
        taken.clear()
        monkeypatch.setattr(cudnn, "part_of", lambda *shape, size=(rows, heads), **how: size)
        got = gradients(q, k, v, do, segments, spec)
        assert set(taken) == {(rows, heads)} and len(taken) == 3 * (3 // rows) * (8 // heads)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
