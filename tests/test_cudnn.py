"""cuDNN's view of packed rows, followed through jax's own conversion to what the kernel is told."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxtrain.kernels.attention import Rows, Spec, cudnn


def documents(rows: list[list[int]], padding: list[int]) -> np.ndarray:
    """Segment ids of rows with documents of these lengths."""
    return np.asarray(
        [np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, pad]) for lengths, pad in zip(rows, padding, strict=True)],
        np.int32,
    )


@pytest.mark.parametrize(
    ("rows", "padding"),
    [
        ([[12]], [0]),
        ([[5, 7], [12], [1, 1, 10]], [0, 0, 0]),
        ([[5, 3], [12], [4], [2, 2, 2, 2]], [4, 0, 8, 4]),
        ([[12], []], [0, 12]),
    ],
)
@pytest.mark.parametrize("max_segments", [4, 7])
def test_every_document_is_where_the_kernel_is_told(rows, padding, max_segments):
    """Entry i of the flattened lengths and offsets is document i of all rows: its length, and its start in elements. The
    padding of a row is its last document, so that the kernel leaves nothing undefined."""
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
