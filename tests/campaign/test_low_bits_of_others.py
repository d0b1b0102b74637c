"""Frozen weights in 8 and 4 bits against bitsandbytes (NF4) and Qwix (e4m3, MXFP4), number by number."""

import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import packages
import pytest

from jaxtrain.config.launch import REPO
from jaxtrain.kernels import low_bits

SHAPES = ((512, 1024), (96, 448), (1000, 64), (257, 4096))  # with 256 blocks of NF4 in the last group, and with fewer


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return (weights by name, other packages' parts of them by NAME.PART)."""
    packages.reference()
    rng, weights = np.random.default_rng(8), {}
    for rows, columns in SHAPES:
        w = 0.02 * rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)) / 2)
        w[0, :64], w[1, ::2] = 0, 0
        weights[f"f32.{rows}"] = w.astype(np.float32)
        weights[f"bf16.{rows}"] = np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32))
    folder = tmp_path_factory.mktemp("low_bits")
    np.savez(folder / "weights.npz", **weights)
    hugging_face.ask(REPO / "tests" / "reference" / "low_bits.py", folder / "weights.npz", folder / "theirs.npz")
    return weights, dict(np.load(folder / "theirs.npz"))


def encoded(w: np.ndarray, dtype: str, fmt: str, first: bool) -> dict[str, np.ndarray]:
    """Return jaxtrain's parts, in the layout (outputs, inputs) whatever the weight's is, and `values`."""
    laid = jnp.asarray(w.T if first else w, dtype)
    parts = jax.jit(low_bits.encode, static_argnums=(1, 2))(laid, fmt, first)
    values = low_bits.decode(parts, fmt, first, laid.dtype).astype(jnp.float32)
    return {k: np.asarray(x.T if first and x.ndim == 2 else x) for k, x in (parts | {"values": values}).items()}


def both(theirs, fmt):
    """Yield jaxtrain's parts of each weight in both layouts, a function of the others' parts, the weight, and its dtype."""
    weights, of_others = theirs
    for name, w in weights.items():
        dtype = "bfloat16" if name.startswith("bf16") else "float32"
        for first in (False, True):
            yield encoded(w, dtype, fmt, first), lambda part, name=name: of_others[f"{name}.{part}"], w, dtype


def test_nf4_has_the_bits_of_bitsandbytes(theirs):
    """The codes and the scales of scales are equal. The scales are the nearest values of the map, from which the CPU kernel of
    bitsandbytes departs by one for a few numbers that are near the middle between two values.
    """
    equal_means = 0
    for ours, of, w, dtype in both(theirs, "nf4"):
        assert np.array_equal(ours["bits"].reshape(-1), of("bits").reshape(-1))
        assert ours["offset"] == pytest.approx(float(of("offset")), rel=1.2e-7)  # its sum is rounded in another order
        off = abs(ours["scale"].reshape(-1).astype(int) - of("scale"))
        assert off.max() <= 1 and off.mean() < 0.01
        same = (off == 0).reshape(len(w), -1).repeat(64, axis=1)
        values = ours["values"][same], of("values")[same]
        assert np.allclose(*values, rtol={"float32": 1e-6, "bfloat16": 2.0**-7}[dtype], atol=0)
        if ours["offset"] == of("offset"):
            equal_means += 1
            assert np.array_equal(ours["second"], of("second"))
            assert np.array_equal(ours["scale"].reshape(-1), of("nearest"))
            assert (values[0] == values[1]).mean() > {"float32": 0.8, "bfloat16": 0.999}[dtype]
        else:
            assert np.allclose(ours["second"], of("second"), rtol=0, atol=2.4e-7 * ours["offset"])
            assert (ours["scale"].reshape(-1) != of("nearest")).mean() < 1e-3
    assert equal_means >= len(SHAPES)


def test_e4m3_has_the_bits_of_qwix(theirs):
    for ours, of, _, _ in both(theirs, "fp8"):
        assert np.array_equal(ours["scale"], of("e4m3_scale"))
        assert np.array_equal(ours["bits"], of("e4m3_bits"))


def test_mxfp4_has_the_numbers_of_qwix(theirs):
    """In each block whose scale is equal: Qwix takes twice the specification's scale where the largest number is above 6 of it.
    It rounds float32 to float16 first, so that a few numbers become the value on the other side of the middle.
    """
    for ours, of, w, dtype in both(theirs, "mxfp4"):
        amax = abs(w.reshape(len(w), -1, 32)).max(-1)
        ratio = of("mxfp4_scale") / np.exp2(ours["scale"].astype(np.float64) - 127)
        assert (ratio[amax > 0] == np.where(np.frexp(amax[amax > 0])[0] > 0.75, 2, 1)).all()
        same = ((ratio == 1) | (amax == 0)).repeat(32, axis=1)
        assert 0.3 < same.mean() < 0.9
        differ = ours["values"][same] != of("mxfp4_values")[same]
        assert differ.mean() <= {"bfloat16": 0, "float32": 1e-3}[dtype]
