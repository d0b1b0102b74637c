"""MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 four-bit numbers with a power of two for each block. Imports no jax."""

import ml_dtypes
import numpy as np

BYTES = 16  # bytes of a block: two numbers a byte, the first in the low half
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest of the four bits is the sign
BIAS = 127  # of the scales, E8M0


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return experts' weights, bfloat16 (E, inputs, outputs). Nothing is rounded: bfloat16 represents MXFP4 numbers exactly.

    blocks, scales: uint8 (E, outputs, inputs / 32, BYTES) and (E, outputs, inputs / 32), as in the published GPT-OSS.
    """
    numbers = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    experts, outputs, count = scales.shape
    out = np.empty((experts, count * BYTES * 2, outputs), ml_dtypes.bfloat16)
    for expert in range(experts):  # one expert at a time, because float32 needs twice the memory
        powers = np.ldexp(np.float32(1), scales[expert].astype(np.int32) - BIAS)
        values = pairs[blocks[expert]].reshape(outputs, count, -1) * powers[..., None]
        out[expert] = values.reshape(outputs, -1).T.astype(ml_dtypes.bfloat16)
    return out
