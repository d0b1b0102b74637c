"""GLM-4-0414 and GLM-Z1: GLM's layers, with norms after attention and MLP, too."""

from jaxtrain.models.families.glm import FAMILY_KEYS, TENSORS
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
POST_NORMS = {
    "layers.{i}.attention_post_norm.scale": HfTensor("model.layers.{i}.post_self_attn_layernorm.weight", "D", "D"),
    "layers.{i}.mlp_post_norm.scale": HfTensor("model.layers.{i}.post_mlp_layernorm.weight", "D", "D"),
}
FORMAT = Format(
    "glm4", "Glm4ForCausalLM", TENSORS | POST_NORMS, KEYS | UNTIED | FAMILY_KEYS, model={"norm_placement": "sandwich"}
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "glm4_0414_9b":  (40, 4096, 32, 2, 128, 13696, 151552, {"qkv_bias": True}),
    },
    norm_eps=1e-05, norm_placement="sandwich", partial_rotary_factor=0.5, rope_base=10_000.0,
)
# fmt: on
