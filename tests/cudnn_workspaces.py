"""A child process of test_cudnn_workspaces: get cuDNN's workspace of backward calls for an H200, without a GPU.

stdin has the cases as JSON. For each case the process prints the bytes that cuDNN reports and the bytes by formula. If cuDNN
cannot be queried on this machine, the process prints the reason and exits with code 3.
"""

import json
import re
import sys

from jaxtrain.plan import cudnn_library

try:
    library = cudnn_library.load()
except cudnn_library.LibraryError as error:
    print(error)
    sys.exit(3)

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import hardware
from jaxtrain.kernels.attention.cudnn import NO_SCORE_MOD
from jaxtrain.plan import topology as machines
from jaxtrain.plan.program import assignment, hlo
from jaxtrain.startup import start_jax

start_jax(hardware.probe())
machine = machines.parse("h200:1")
mesh = Mesh(np.array(machines.devices(machine)), ("x",))


def program(rows, documents, T, S, N, K, H, causal=True, window=0, deterministic=False):
    """Return the HLO of one backward call of cuDNN's attention.

    Args:
        rows: number of sequences in the batch.
        documents: number of documents in each packed sequence, with its padding counted as one; 0 if sequences are not packed.
    """
    kinds = fused.MaskType
    mask = (kinds.PADDING_CAUSAL if causal else kinds.PADDING) if documents else (kinds.CAUSAL if causal else kinds.NO_MASK)
    static = {
        "scale": H**-0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
    } | NO_SCORE_MOD
    static |= {"layout": fused.AttentionLayout.BTNH.value, "sliding_window_length": window or None}

    def backward(q, k, v, out, do, stats, lengths, offsets):
        none = jnp.zeros(0, q.dtype)
        described = (lengths, lengths, offsets, offsets) if documents else (none,) * 4
        return fused._dot_product_attention_bwd_p_wrapper.bind(q, k, v, none, *described, none, none, stats, out, do, **static)

    whole = PartitionSpec()
    step = jax.jit(jax.shard_map(backward, mesh=mesh, in_specs=(whole,) * 8, out_specs=whole, check_vma=False))
    queries, keys = (rows, T, N, H), (rows, S, K, H)
    shapes = [(s, jnp.bfloat16) for s in (queries, keys, keys, queries, queries)]
    shapes += [
        ((rows * max(1, documents), N, T), jnp.float32),
        ((rows, documents), jnp.int32),
        ((rows, documents + 1), jnp.int32),
    ]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole)) for shape, dtype in shapes]
    return step.lower(*given).compile(compiler_options=library.options(machine.description) | options(deterministic)).as_text()


def options(deterministic: bool) -> dict[str, str | bool]:
    return dict.fromkeys(assignment.DETERMINISTIC, True) if deterministic else {}


for case in json.load(sys.stdin):
    text = program(**case)
    asked = assignment.read_workspace(hlo.parse(text), {})
    without = re.sub(r"u8\[\d+\]", "u8[0]", text)
    counted = assignment.read_workspace(hlo.parse(without), options(case.get("deterministic", False)))
    print(json.dumps([asked.by, asked.largest, counted.by, counted.largest]), flush=True)
