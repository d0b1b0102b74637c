"""Weights in bitsandbytes' NF4 and in Qwix's e4m3 and MXFP4: `python low_bits.py WEIGHTS.npz OUT.npz`.

WEIGHTS has matrices (outputs, inputs) in float32; those whose names start with bf16 are handed over in bfloat16. OUT has
NAME.PART for each:

    bits, scale, second, offset, values    bitsandbytes' tensors, and its float32 or bfloat16 numbers
    nearest                                `scale` without the table of its CPU kernel: see below
    e4m3_bits, e4m3_scale                  Qwix, one scale for each output
    mxfp4_values, mxfp4_scale              Qwix, blocks of 32 inputs

The CPU kernel of bitsandbytes rounds float32 numbers to one of 65,536 steps before it looks for the nearest of the 256 values.
For numbers in float64 the same operation has a path without the table, and so have its kernels for GPUs.
"""

import sys

import bitsandbytes.functional as bnb
import jax
import jax.numpy as jnp
import numpy as np
import torch
from qwix._src.core import qarray

out = {}
for name, w in np.load(sys.argv[1]).items():
    a = torch.from_numpy(w).to(torch.bfloat16 if name.startswith("bf16") else torch.float32)
    bits, state = bnb.quantize_4bit(a, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, single = bnb.quantize_4bit(a, blocksize=64, compress_statistics=False, quant_type="nf4")
    numbers = (single.absmax - state.offset).double()
    nearest, _ = torch.ops.bitsandbytes.quantize_blockwise.default(numbers, bnb.create_dynamic_map(), 256)
    parts = {"bits": bits, "scale": state.absmax, "second": state.state2.absmax, "offset": state.offset, "nearest": nearest}
    parts["values"] = bnb.dequantize_4bit(bits, state).float()
    out |= {f"{name}.{part}": x.numpy() for part, x in parts.items()}

    e4m3 = qarray.quantize(jnp.asarray(w), qarray.HowToQuantize(qtype=jnp.float8_e4m3fn, channelwise_axes=(0,)))
    out[f"{name}.e4m3_bits"] = np.asarray(jax.lax.bitcast_convert_type(e4m3.qvalue, jnp.uint8))
    out[f"{name}.e4m3_scale"] = np.asarray(e4m3.scale)[:, 0]
    mxfp4 = qarray.quantize(jnp.asarray(w), qarray.HowToQuantize(qtype="mxfp4", channelwise_axes=(0,), tiled_axes={1: 32}))
    out[f"{name}.mxfp4_values"], out[f"{name}.mxfp4_scale"] = np.asarray(qarray.dequantize(mxfp4)), np.asarray(mxfp4.scale)
np.savez(sys.argv[2], **out)
