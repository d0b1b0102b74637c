"""Helpers of the FP8 tests: an independent rounding to 8 bits, the first step's gradients, and the names of weights in FP8."""

import functools

import helpers
import jax
import ml_dtypes
import numpy as np

from jaxtrain.kernels import fp8
from jaxtrain.parity import compare
from jaxtrain.train.definition import fp8_weights

F8 = {fp8.E4M3: ml_dtypes.float8_e4m3fn, fp8.E5M2: ml_dtypes.float8_e5m2}


def emulated(a, dtype) -> np.ndarray:
    """Return an array after quantization to FP8 and back, with scale and rounding written independently of the package."""
    a = np.asarray(a, np.float64)
    scale = 2.0 ** (np.floor(np.log2(np.float32(np.abs(a).max()) / np.float32(ml_dtypes.finfo(F8[dtype]).max))) + 1)
    return (a / scale).astype(np.float32).astype(F8[dtype]).astype(np.float64) * scale


@functools.cache
def first_gradients(run) -> dict[str, np.ndarray]:
    """Return the gradients of the first step, by tensor. XLA may not skip roundings to bfloat16 that the program contains."""
    made = helpers.program(run)
    step = made.train_step.lower(made.state, made.batch).compile(compiler_options={"xla_allow_excess_precision": False})
    return compare.take_steps(made, step, helpers.fresh_state(run), lambda i: helpers.host_batch(run, i), 1)[0].gradients


def names(run) -> set[str]:
    """Return the names of the weights whose matmuls a run computes in FP8."""
    found = fp8_weights(run, helpers.program(run).definition)
    paths = jax.tree_util.tree_leaves_with_path(found)
    return {".".join(key.key for key in path) for path, eight in paths if eight}
