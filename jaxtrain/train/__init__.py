"""The train step, its state, its compilation, and the training loop."""

import sys

from jaxtrain.callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule
