"""Choose a run's attention kernel."""

from typing import Any

from jaxtrain.config.context import Context
from jaxtrain.config.schema import RunConfig
from jaxtrain.kernels.attention import EMULATED, Hardware, support
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.models.attention import Kernel
from jaxtrain.step.attention_specs import attention_specs, calls, training_specs


def choose_kernel(run: RunConfig, context: Context, device: Any) -> tuple[Kernel, str]:
    """Return (the attention kernel for training on devices of the type of `device`, the reason for the choice)."""
    hardware = Hardware.from_device(device)
    specs = attention_specs(run.model, run.data, run.compute, run.train.deterministic)
    specs = training_specs(specs, run.attention.forward, hardware)
    name, reason = support.choose_attention(run.attention.impl, calls(specs, run.data.seq_len, context), hardware)
    if run.attention.forward == "fp8":
        reason += f"; forward pass in e4m3{', emulated' * (specs[0].fp8 == EMULATED)}"
    return Kernel(name, specs, Split(context)), reason
