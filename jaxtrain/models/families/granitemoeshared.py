"""Granite MoE with a shared expert."""

from typing import Any

from jaxtrain.models.families.granitemoe import ALL_KEYS, MODEL, STRUCTURE, TENSORS, WRITTEN
from jaxtrain.models.hf_keys import COUNT, HfKey
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.hugging_face import Format

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
MLP = "model.layers.{i}.shared_mlp."
SHARED = {
    "layers.{i}.mlp.shared.gate": HfTensor(MLP + "input_linear.weight", "D S", "(S + S) D", 0),
    "layers.{i}.mlp.shared.up": HfTensor(MLP + "input_linear.weight", "D S", "(S + S) D", 1),
    "layers.{i}.mlp.shared.down": HfTensor(MLP + "output_linear.weight", "D S", "D S"),
}
FAMILY_KEYS = {"shared_intermediate_size": HfKey("shared_d_ff", COUNT)}
FORMAT = Format(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", TENSORS | SHARED, ALL_KEYS | FAMILY_KEYS, model=MODEL, written=WRITTEN
)
PRESETS: dict[str, dict[str, Any]] = {}
