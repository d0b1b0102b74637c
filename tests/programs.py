"""Compiled programs, kept in this process: a run that another test has already compiled is not compiled again.

JAX's compile cache on disk cannot do this: XLA:CPU loads programs for several devices wrongly (jaxtrain/runtime/startup.py).
"""

import collections
from typing import Any

from jax._src import cache_key, compiler

KEPT = 48
kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
_compile = compiler.compile_or_get_cached


def compile_once(
    backend: Any, computation: Any, devices: Any, options: Any, host_callbacks: Any, *more: Any, **named: Any
) -> Any:
    """Return the compiled program of a computation, from `kept` or compiled now. Replaces JAX's compile_or_get_cached."""

    def compiled() -> Any:
        return _compile(backend, computation, devices, options, host_callbacks, *more, **named)

    # A host callback is bound to this call. For a described machine, the plan reads files that XLA writes as it compiles.
    if host_callbacks or "CompileOnly" in type(backend).__name__:
        return compiled()
    key = cache_key.get(computation, devices, options, backend)
    if key not in kept:
        kept[key] = compiled()
        if len(kept) > KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def keep_programs() -> None:
    """Make JAX compile by `compile_once`."""
    compiler.compile_or_get_cached = compile_once
