"""Reading a step back: into any layout, and only what was saved."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain import digests
from jaxtrain.checkpoint import files
from jaxtrain.checkpoint.arrays import cause, context, differences, innermost, of_processes, orbax
from jaxtrain.checkpoint.errors import CheckpointError, Damaged, Unreachable
from jaxtrain.checkpoint.place import ARRAYS
from jaxtrain.checkpoint.steps import PEERS_S, Steps
from jaxtrain.distributed import Peers


def restore(
    steps: Steps,
    step: int,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    subset: bool,
    cast: bool,
    peers: Peers,
    finite: bool,
) -> dict[str, jax.Array]:
    """The tensors of a step, each with the shape, dtype and sharding `abstract` asks for, on any mesh.

    subset: `abstract` may name a part of the tensors; the others are not read. cast: a float may become another float
    type (rounded to nearest); otherwise a different dtype is an error.
    Raises CheckpointError, before any tensor is read, naming what differs between checkpoint and run; Damaged where what
    was read is not what was saved.
    """
    recorded = steps.meta(step)["tensors"]
    stored = steps.stored(step)
    problems = differences(stored, abstract, subset=subset, cast=cast)
    folder = steps.directory / str(step)
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise CheckpointError(
            f"checkpoint {folder} does not fit this run ({len(problems)} differences):\n  "
            + "\n  ".join(shown)
            + "\nUse the config that wrote it (key 'config' in its meta.json), or another workdir for a new run."
        )
    # In the dtypes that were stored: Orbax would cast, and the digests are of the stored bits.
    exactly = {k: jax.ShapeDtypeStruct(a.shape, stored[k].dtype, sharding=a.sharding) for k, a in abstract.items()}
    tensors, error = _load(steps, step, exactly, subset, peers.count)
    errors = peers.gather("read", f"{type(error).__name__}:{error}" if error else "", PEERS_S)
    if error:
        raise error
    if any(errors):
        raise (Damaged if any(e.startswith("Damaged:") for e in errors) else CheckpointError)(of_processes(errors))
    found = digests.of_many(tensors)
    wrong = [name for name, digest in found.items() if digests.text(digest) != recorded[name][2]]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise Damaged(
            f"checkpoint {folder}: {shown} {'is' if len(wrong) == 1 else 'are'} not what was saved: the digest of the "
            f"values read differs from that of the values on the devices then. {steps.way_out(step)}"
        )
    undefined = [name for name, x in found.items() if name.startswith("params.") and digests.not_finite(x)]
    if undefined and finite:
        raise Damaged(f"checkpoint {folder}: {undefined[0]} holds values that are infinite or no number. {steps.way_out(step)}")
    return {name: _cast(tensors.pop(name), a.dtype) for name, a in abstract.items()}


def _load(
    steps: Steps, step: int, exactly: dict[str, jax.ShapeDtypeStruct], subset: bool, processes: int
) -> tuple[dict[str, jax.Array], Exception | None]:
    folder, ocp = steps.directory / str(step), orbax()
    try:
        with context(ocp, subset, processes):
            return ocp.load(folder / ARRAYS, exactly), None
    except Exception as e:  # a page of wrappers around one sentence
        inside = cause(e)
        if isinstance(inside, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(inside):
            return {}, inside  # the devices have no room for it, and the files are not to blame
        text = f"{folder / ARRAYS} cannot be read: {innermost(e)}."
        try:
            verdict = files.check(folder)
        except Unreachable as unreachable:
            return {}, unreachable
        if verdict.proved and not verdict.problems:
            return {}, CheckpointError(f"{text} Its files are as they were written, so this is no damage.")
        named = "; ".join(verdict.problems[:3])
        return {}, Damaged(f"{text} {named + '. ' if named else ''}{steps.way_out(step)}")


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.jit(lambda y: y.astype(dtype), out_shardings=x.sharding, donate_argnums=0)(x)
