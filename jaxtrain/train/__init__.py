"""The train step, its state, how it is compiled, and the run around it."""

import sys

from jaxtrain.callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule
