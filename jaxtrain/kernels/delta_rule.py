"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and the short convolution before it, within documents.

Each head has a state, a matrix S (K, V). A token multiplies S by its decay, writes its value v at its key k, and reads S with
its query q:

    S = decay S;    S = S + k (beta (v - S^T k))^T;    o = S^T q

with 0 < decay < 1 and 0 < beta < 1. `delta_rule` computes the tokens of a chunk together, and scans over chunks. S is zero
before the first token of each document.
"""

import jax
import jax.numpy as jnp

from jaxtrain.config.shapes import DELTA_CHUNK

EXACT = jax.lax.Precision.HIGHEST  # float32 matmuls: TF32 would add rounding errors in each block of an inverse


def delta_rule(
    q_BTNK: jax.Array,
    k_BTNK: jax.Array,
    v_BTNV: jax.Array,
    log_decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segments_BT: jax.Array,
    state_BNKV: jax.Array | None = None,
    chunk: int = DELTA_CHUNK,
    precision: jax.lax.Precision = EXACT,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs o, (B, T, N, V), and the state after the last token, (B, N, K, V), in the dtype of the arguments.

    In a chunk that begins with the state S, let g_i be the sum of log decays from the chunk's start to token i. Token i writes
    k_i u_i^T, with

        u_i + beta_i sum_{j<i} exp(g_i - g_j) (k_i . k_j) u_j = beta_i (v_i - exp(g_i) S^T k_i)

    over the tokens j of its own document. This triangular system is solved for all chunks at once: u = U - W S. The scan over
    chunks has only the matmuls with S or u. exp(g_i) is 0 where the document of i begins in this chunk.

    Args:
      log_decay_BTN: logarithm of each token's decay, at most 0.
      segments_BT: document of each token. The tokens of a document are neighbours.
      state_BNKV: the state before the first token, whose document it is of; None: zeros.
      chunk: tokens that are computed together, at most.
    """
    B, T, N, _ = q_BTNK.shape
    chunk = min(chunk, T)
    padding = -T % chunk

    def chunks(x: jax.Array, mode: str = "constant") -> jax.Array:
        """Reshape (B, T, N, ...) to (chunks, B, N, C, ...)."""
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        x = x.reshape(B, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3) if x.ndim > 3 else jnp.moveaxis(x, 1, 0)

    def product(eqn: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(eqn, x, y, precision=precision)

    q, k, v, beta = (chunks(x) for x in (q_BTNK, k_BTNK, v_BTNV, beta_BTN))
    g = chunks(log_decay_BTN)
    # The padding has the last document: with keys of 0 and decays of 1 it does not change the state.
    segments = chunks(segments_BT, "edge")[:, :, None]  # (chunks, B, 1, C), as g without heads
    none = jnp.full_like(segments[:1, ..., -1:], -1)
    before = jnp.concatenate([none if state_BNKV is None else segments[:1, ..., :1], segments[:-1, ..., -1:]])

    def decay(log: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(mask, log, -jnp.inf))

    # Sums of log decays from token j to token i. Differences of sums from the first token would lose digits, and so would their
    # gradients.
    later = jnp.tril(jnp.ones((chunk, chunk), bool), -1)[None, None, None]
    sums = jnp.cumsum(jnp.where(later, g[..., :, None], 0.0), -2)
    same_document = (later | jnp.eye(chunk, dtype=bool)[None, None, None]) & (segments[..., :, None] == segments[..., None, :])
    between = decay(sums, same_document)
    from_state, to_state = decay(jnp.cumsum(g, -1), segments == before), between[..., -1, :]
    chunk_decay = from_state[..., -1:]
    system = jnp.tril(beta[..., None] * between * product("...iK,...jK->...ij", k, k), -1)
    rhs = beta[..., None] * jnp.concatenate([from_state[..., None] * k, v], -1)
    w, u = jnp.split(product("...ij,...jK->...iK", inverse(system), rhs), [k.shape[-1]], axis=-1)
    scores = between * product("...iK,...jK->...ij", q, k)
    read, write = from_state[..., None] * q, to_state[..., None] * k

    def body(state: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        w, u, scores, read, write, chunk_decay = arrays
        u = u - product("BNCK,BNKV->BNCV", w, state)
        o = product("BNCK,BNKV->BNCV", read, state) + product("BNij,BNjV->BNiV", scores, u)
        return chunk_decay[..., None] * state + product("BNCK,BNCV->BNKV", write, u), o

    state = jnp.zeros((B, N, k.shape[-1], v.shape[-1]), v.dtype) if state_BNKV is None else state_BNKV
    state, o = jax.lax.scan(body, state, (w, u, scores, read, write, chunk_decay))
    return jnp.moveaxis(o, (0, 3), (1, 2)).reshape(B, -1, N, v.shape[-1])[:, :T], state


@jax.custom_jvp
def inverse(below: jax.Array) -> jax.Array:
    """Return the inverse of I + `below`, (..., C, C). `below` is strictly lower triangular.

    Diagonal blocks of one row are inverted first, then blocks of two, four and more rows. The inverse of [[a, 0], [c, b]] is
    [[a^-1, 0], [-b^-1 c a^-1, b^-1]], so only matmuls are needed. They are faster than cuBLAS's solver for many small
    triangular systems.
    """
    size, block = below.shape[-1], 1
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None]
    result = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    while block < size:
        lower = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        c = jnp.where(jnp.broadcast_to(lower, below.shape), below, 0.0)
        result -= c if block == 1 else jnp.matmul(jnp.matmul(result, c, precision=EXACT), result, precision=EXACT)
        block *= 2
    return result


@inverse.defjvp
def _inverse_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # No custom_vjp: the remat policy `none` takes each of them for a gather of weights, and saves no result of it.
    (below,), (tangent,) = primals, tangents
    result = inverse(below)
    return result, -jnp.matmul(jnp.matmul(result, tangent, precision=EXACT), result, precision=EXACT)


def short_convolution(
    x_BTNH: jax.Array, taps_NHW: jax.Array, segments_BT: jax.Array, before_BWNH: jax.Array | None = None
) -> jax.Array:
    """Return silu of each channel's causal convolution over tokens of the same document, in float32, (B, T, N, H).

    before_BWNH: the W - 1 inputs before the first token, of its document; None: it has none.
    """
    x_BTNH, width, y_BTNH = x_BTNH.astype(jnp.float32), taps_NHW.shape[-1], 0.0
    T = x_BTNH.shape[1]
    for back in range(width):
        shape = (x_BTNH.shape[0], back)
        first = jnp.zeros((*shape, *x_BTNH.shape[2:]), jnp.float32)
        document = jnp.full(shape, -1, segments_BT.dtype)
        if before_BWNH is not None:
            first = before_BWNH[:, width - 1 - back :].astype(jnp.float32)
            document = jnp.broadcast_to(segments_BT[:, :1], shape)
        shifted = jnp.concatenate([first, x_BTNH], 1)[:, :T]
        same_document = (jnp.concatenate([document, segments_BT], 1)[:, :T] == segments_BT)[..., None, None]
        y_BTNH += jnp.where(same_document, shifted, 0.0) * taps_NHW[None, None, ..., width - 1 - back].astype(jnp.float32)
    return jax.nn.silu(y_BTNH)


def last_inputs(x_BTNH: jax.Array, before_BWNH: jax.Array) -> jax.Array:
    """Return the last W - 1 inputs of a convolution, after the inputs `before_BWNH` (B, W - 1, N, H) and these."""
    inputs = jnp.concatenate([before_BWNH, x_BTNH.astype(before_BWNH.dtype)], 1)
    return inputs[:, inputs.shape[1] - before_BWNH.shape[1] :]
