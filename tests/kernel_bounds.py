"""Error bounds of kernels: how far a result may be from its definition, element by element, by the types it is computed in.

They bound every element and are no averages: a correct kernel stays below them everywhere, and a result above is an error.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.kernels import fp8

EXACT = 2.0**-24  # unit roundoff of float32: sums and softmax are in float32 everywhere
ROUNDOFF = {"f32": EXACT, "bf16": 2.0**-8}  # unit roundoff of a kernel's inputs and results, by type

FORMATS = {fp8.E4M3: ml_dtypes.float8_e4m3fn, fp8.E5M2: ml_dtypes.float8_e5m2}


def in_8_bits(a: Any, dtype: Any) -> np.ndarray:
    """Return an array after quantization to FP8 and back, with scale and rounding written independently of the package."""
    a = np.asarray(a, np.float64)
    scale = 2.0 ** (np.floor(np.log2(np.float32(np.abs(a).max()) / np.float32(ml_dtypes.finfo(FORMATS[dtype]).max))) + 1)
    return (a / scale).astype(np.float32).astype(FORMATS[dtype]).astype(np.float64) * scale


def sums(y: Any, size: Any, summed: Any, *, dtype: str) -> Any:
    """Return the error bounds of y, an array of sums of products, that a kernel adds in float32 and rounds to `dtype`.

    size: the sums of the products' absolute values. summed: the number of products in each sum. Each addition, and each product
    of float32 numbers, has a roundoff of 2^-24.
    """
    return summed * EXACT * size + ROUNDOFF[dtype] * abs(y)


def attention(
    q_TGH: Any,
    k_SH: Any,
    v_SH: Any,
    do_TGH: Any,
    visible_TS: Any,
    *,
    dtype: str,
    softcap: float = 0.0,
    sinks_G: Any = None,
    blocks: bool = False,
    xp: Any,
    einsum: Callable[..., Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the definition's results on the kernel's own inputs, and a kernel's error bounds: each (o, dq, dk, dv).

    The inputs are one row and one key/value head, with the G query heads of its group. `xp` and `einsum` are NumPy's, in
    float64, or jax.numpy's, in float32 with the highest precision. With s the scores, P = softmax(s), dP = do v^T,
    delta = sum(do o) and dS = P (dP - delta), o = P v, dq = dS k / sqrt(H), dk = dS^T q / sqrt(H) and dv = P^T do.

    A kernel multiplies exactly and adds in float32, with roundoff e = 2^-24. It rounds to its type, each time by at most u (e
    for float32, 2^-8 for bfloat16) of the number: the weights P, dP, dS and every result. With |.| taken element by element, to
    first order in e and u:

        s    d = e ((H + 4) |q| |k| / sqrt(H) + 4 |s|)             products and sum, then scaled, less the largest score
        P    F P, F = d + (P d, summed over keys) + (S + 16) e     the exponential, and the sum it is divided by
        o    ((u + F) P) |v| + S e P |v| + u |o|
        dv   ((u + F) P)^T |do| + T G e P^T |do| + u |dv|
        D    error of delta: 2 u |do| . P |v|  (o is rounded, and P), + |do| . F P |v|, + (S + H) e |do| . P |v|
        E    error of dS: (2 u + F) |dS| + P (u |dP| + H e |do| |v| + D)
        dq   (E |k| + S e |dS| |k|) / sqrt(H) + u |dq|
        dk   (E^T |q| + T G e |dS|^T |q|) / sqrt(H) + u |dk|

    For grouped queries each head's part of dk and dv may be rounded once more before the parts are added. With a soft cap,
    s = c t and t = tanh(q k / (c sqrt(H))), the error of s is d times the slope 1 - t^2, plus 8 e c for tanh itself. dS then
    has the slope as a factor, whose error is 2 (8 e + d / c). Where a score is far above the cap, the slope is smaller than
    its error, so E also has the product of the slope's error with the other errors.

    blocks: attention merges the results of blocks of keys, and rounds the result of each block once more. That adds, at most,
    u (P |v|) to o (and so half as much again to D's first part), u (|dS| |k|) / sqrt(H) to dq, u (|dS|^T |q|) / sqrt(H) to dk
    and u (P^T |do|) to dv.

    sinks_G: one more score for each head, which every query includes in its softmax, with a value vector of zero. The results
    then have a fifth element: the sinks' gradient -sum(p delta) over queries, with p the sinks' weights. Its bound is the sum
    over queries of p D + |delta| p (sum(P d) + (S + 16) e), plus T e times the sum of |delta| p.
    """
    u, e = ROUNDOFF[dtype], EXACT
    (T, G, H), S = q_TGH.shape, k_SH.shape[0]
    scale = H**-0.5
    q, k, v, do = (abs(x) for x in (q_TGH, k_SH, v_SH, do_TGH))
    visible = visible_TS[None]

    raw = einsum("TGH,SH->GTS", q_TGH, k_SH) * scale
    d = e * (H + 4) * einsum("TGH,SH->GTS", q, k) * scale + 4 * e * abs(raw)
    scores, slope, d_slope = raw, 1.0, 0.0
    if softcap:
        t = xp.tanh(raw / softcap)
        slope, d_slope = 1 - t * t, 2 * (8 * e + d / softcap)
        scores, d = softcap * t, d * slope + 8 * e * softcap
    top = xp.where(visible, scores, -1e30).max(-1, keepdims=True)
    sink = 0.0
    if sinks_G is not None:
        top = xp.maximum(top, sinks_G[:, None, None])
        sink = xp.exp(sinks_G[:, None, None] - top)
    P = xp.where(visible, xp.exp(xp.where(visible, scores - top, 0.0)), 0.0)
    total = xp.maximum(P.sum(-1, keepdims=True) + sink, 1e-30)
    P, sink = P / total, sink / total
    dP = einsum("TGH,SH->GTS", do_TGH, v_SH)
    without_slope = P * (dP - (P * dP).sum(-1, keepdims=True))
    dS = without_slope * slope

    F = P * (d + (P * d).sum(-1, keepdims=True) + (S + 16) * e)
    Pv, Fv = einsum("GTS,SH->TGH", P, v), einsum("GTS,SH->TGH", F, v)
    D = ((3 if blocks else 2) * u + (S + H) * e) * einsum("TGH,TGH->GT", do, Pv) + einsum("TGH,TGH->GT", do, Fv)
    dPs = H * e * einsum("TGH,SH->GTS", do, v)
    F_of_dS = F * abs(dP - (P * dP).sum(-1, keepdims=True))
    error = F_of_dS + P * (u * abs(dP) + dPs + D[..., None])
    E = 2 * u * abs(dS) + (slope + d_slope) * error + abs(without_slope) * d_slope

    o = einsum("GTS,SH->TGH", P, v_SH)
    dq = einsum("GTS,SH->TGH", dS, k_SH) * scale
    dk_parts, dv_parts = einsum("GTS,TGH->SGH", dS, q_TGH) * scale, einsum("GTS,TGH->SGH", P, do_TGH)
    dk, dv = dk_parts.sum(1), dv_parts.sum(1)
    again = u if blocks else 0.0
    more_dq, more_dk = einsum("GTS,SH->TGH", abs(dS), k) * scale, einsum("GTS,TGH->SH", abs(dS), q) * scale
    Pdo = einsum("GTS,TGH->SH", P, do)
    values = o, dq, dk, dv
    bounds = (
        (u + again + S * e) * Pv + Fv + u * abs(o),
        scale * einsum("GTS,SH->TGH", E, k) + (again + S * e) * more_dq + u * abs(dq),
        scale * einsum("GTS,TGH->SH", E, q) + (again + T * G * e) * more_dk + u * (abs(dk) + abs(dk_parts).sum(1)),
        (u + again + T * G * e) * Pdo + einsum("GTS,TGH->SH", F, do) + u * (abs(dv) + abs(dv_parts).sum(1)),
    )
    if sinks_G is None:
        return values, bounds
    delta = (P * dP).sum(-1)
    of_sink = sink[..., 0] * abs(delta) * ((P * d).sum(-1) + (S + 16 + T) * e) + sink[..., 0] * D
    return (*values, -(sink[..., 0] * delta).sum(-1)), (*bounds, of_sink.sum(-1))
