"""Modules that are also functions of the Python API: both `jaxtrain.plan(config, topology)` and `jaxtrain.plan.make` work."""

import importlib
import types
from typing import Any


class CallableModule(types.ModuleType):
    """The class of a module with the name of an API function. Calling the module calls the function of jaxtrain/api.py.

    `python -m jaxtrain.plan` needs a module of this name. Its import sets the attribute `jaxtrain.plan` to the module, so
    `jaxtrain.plan(...)` works only if the module can be called.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = getattr(importlib.import_module("jaxtrain.api"), self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)
