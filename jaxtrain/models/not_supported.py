"""Model types without a family in jaxtrain: the nearest family, and what it lacks for them. Data only.

The sources are transformers' modeling files; types that transformers lacks are by the code that comes with their models.
"""

# Model types that compute text as a family does, with its keys and tensors -> that family.
SAME = {
    "emu3_text_model": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
# Types of models that also see or hear, and compute text in another way than their text part alone -> why.
OTHER_TEXT = {
    "paligemma": "tokens of a prompt attend to all others of the prompt",
}
# (nearest family, what it lacks, model types).
# fmt: off
GROUPS = (
    # LayerNorm
    ("llama", "LayerNorm with biases, and a feed-forward block without a gate", "starcoder2 jais2"),
    ("llama", "LayerNorm with biases, a feed-forward block without a gate, and rotary embeddings on a part of each head",
     "persimmon nemotron"),
    ("llama", "LayerNorm without weights", "olmo"),
    ("llama", "LayerNorm with biases, and rotary embeddings on a part of each head", "stablelm"),
    ("llama", "LayerNorm with biases, one feed-forward block without a gate beside attention, not after it, and rotary "
     "embeddings on a part of each head", "phi gpt_neox gpt_neox_japanese gptj codegen"),
    ("llama", "LayerNorm, and a feed-forward block without a gate beside attention, not after it", "falcon"),
    ("llama", "LayerNorm, attention beside the feed-forward block, not before it, and layers without rotary embeddings",
     "cohere2 cohere_compass_text"),
    ("llama", "LayerNorm, and attention beside the feed-forward block, not before it", "cohere"),
    ("mixtral", "attention beside the feed-forward block, not before it, layers without rotary embeddings, and shared experts",
     "cohere2_moe"),
    ("mixtral", "LayerNorm, and a limit on queries, keys and values (clip_qkv)", "dbrx"),
    ("mixtral", "LayerNorm with biases, biases of attention, and a router with a threshold (sparsemixer)", "phimoe"),
    ("gemma3", "LayerNorm, a first layer without its norm, and a head with a dense layer of its own", "modernbert-decoder"),
    # No rotary embeddings
    ("llama", "learned positions, LayerNorm with biases, and a feed-forward block without a gate",
     "gpt2 gpt-sw3 gpt_bigcode gpt_neo openai-gpt opt biogpt bert bert-generation big_bird camembert data2vec-text electra "
     "ernie git megatron-bert rembert roberta roberta-prelayernorm roc_bert xlm xlm-roberta xlm-roberta-xl xmod"),
    ("llama", "sinusoidal positions, LayerNorm with biases, and a feed-forward block without a gate", "xglm ctrl"),
    ("llama", "relative positions, LayerNorm with biases, and a feed-forward block without a gate", "xlnet"),
    ("llama", "rotary embeddings of neighbouring pairs, LayerNorm with biases, and a feed-forward block without a gate",
     "roformer"),
    ("llama", "a bias of attention by distance (ALiBi), LayerNorm, and a feed-forward block without a gate", "bloom mpt"),
    ("llama", "a learned bias of attention by distance, and a feed-forward block of gated gelu", "cpmant"),
    # Feed-forward blocks
    ("llama", "a feed-forward block without a gate (relu2)", "arcee"),
    ("qwen3", "a feed-forward block without a gate (xIELU)", "apertus"),
    ("qwen3", "norms without weights, norms on queries and keys after the rotation, and a feed-forward block without a gate "
     "(relu2)", "nanochat"),
    ("llama", "weights of three values, and norms within attention and the feed-forward block", "bitnet"),
    # Attention
    ("llama", "attention by hashes, and layers that are inverted in the backward pass", "reformer"),
    ("llama", "attention as the difference of two softmaxes", "diffllama"),
    ("qwen3", "attention with a mask that depends on the values, weights of the residual stream, and experts by product keys",
     "doge"),
    ("qwen3", "norms on queries and keys after the rotation, and rope_type = 'dynamic' with alpha", "hunyuan_v1_dense"),
    ("qwen3_moe", "norms on queries and keys after the rotation, rope_type = 'dynamic' with alpha, and a shared expert",
     "hunyuan_v1_moe"),
    ("mistral", "a factor on queries that grows with the position (llama_4_scaling_beta)", "ministral3"),
    ("deepseek_v3", "a factor on queries that grows with the position (llama_4_scaling_beta), and a router of softmax",
     "mistral4"),
    ("mixtral", "layers without rotary embeddings, a factor on queries that grows with the position, experts whose inputs are "
     "weighted, and a shared expert", "llama4_text"),
    ("llama", "layers that attend to an image", "mllama_text_model"),
    # Multipliers and norms
    ("granite", "sinks of attention, and rotary bases by layer", "granite_swa"),
    ("granitemoeshared", "sinks of attention, and rotary bases by layer", "granitemoe_swa"),
    # Experts
    ("deepseek_v3", "a router of softmax", "deepseek_v2"),
    ("glm4_moe_lite", "a norm after the experts", "axk1"),
    ("ernie4_5", "experts, with a router of softmax and a bias, and shared experts", "ernie4_5_moe"),
    ("dots1", "layers without rotary embeddings, and mlp_layer_types in place of first_k_dense_replace", "exaone_moe"),
    ("dots1", "keys of its own for experts (mlp_layer_types, router_scaling_factor)", "hy_v3"),
    ("qwen3_moe", "sliding windows, rotary settings by type of layer, and layers without experts (mlp_layer_types)", "mellum"),
    ("qwen3_moe", "sinks of attention, layers without rotary embeddings, sliding windows, a router of sigmoid, and shared "
     "experts", "flint"),
    ("qwen3_moe", "a gate on attention, sliding windows, layers without rotary embeddings, norms before and after each block, "
     "DeepSeek-V3's router, and shared experts", "afmoe"),
    ("qwen3_moe", "a gate on attention, sliding windows, layers without rotary embeddings, a residual stream scaled by depth, "
     "and a router in groups", "beam"),
    ("qwen3_moe", "sliding windows, layers without rotary embeddings, norms before and after each block, a router with a "
     "bias, and shared experts", "kolibri1"),
    ("qwen3_moe", "a gate on attention, numbers of heads by layer, rotary settings by type of layer, a router of sigmoid, and "
     "shared experts", "laguna"),
    ("deepseek_v3", "plain attention with other widths of heads in layers with a sliding window, sinks of attention, and a "
     "scale of values", "mimo_v2_flash"),
    ("deepseek_v3", "two blocks of attention in a layer, experts beside the second, experts that pass tokens on, and scales "
     "of queries and keys", "longcat_flash"),
    ("mixtral", "experts of attention", "jetmoe"),
    ("mixtral", "shared experts", "aria_text"),
    ("mixtral", "a router before attention, experts of relu, and layers without rotary embeddings", "smallthinker"),
    ("qwen3_moe", "convolutions over queries and keys, a router of several layers with a state, and biases of the stream",
     "zaya"),
    # Latent attention
    ("deepseek_v3", "multipliers of the embedding, of blocks and of the head, and a dense feed-forward block in every layer",
     "minicpm3"),
    ("deepseek_v3", "attention to chosen tokens alone (an indexer)", "deepseek_v32 glm_moe_dsa"),
    ("deepseek_v3", "attention to chosen tokens alone (an indexer), sliding windows with other widths of heads, and a gate on "
     "attention", "dots3_note_text"),
    ("deepseek_v3", "attention to chosen tokens alone (an indexer), keys that layers share, and a factor on queries that "
     "grows with the position", "mistral_large4_text"),
    ("deepseek_v3", "attention to chosen tokens alone (an indexer), and norms and queries with gates", "axk2"),
    ("deepseek_v3", "attention to compressed and chosen tokens, several residual streams (hyper-connections), and experts by "
     "token", "deepseek_v4"),
    ("deepseek_v3", "attention to chosen tokens alone (an indexer), a gate and sinks of attention, and several residual "
     "streams", "hy_v4"),
    ("minimax_m2", "attention to chosen blocks alone (an indexer), norms of each head, limits on the feed-forward block, and "
     "shared experts", "minimax_m3_vl_text"),
    # Recurrent layers
    ("deepseek_v3", "layers of linear attention (KDA)", "kimi_linear bailing_hybrid"),
    ("qwen3_next", "norms after each block of attention, and one norm over all heads of queries and keys", "olmo_hybrid"),
    ("qwen3_5_moe", "several residual streams, embeddings of n-grams, and attention to chosen blocks alone (an indexer)",
     "qwen4_exp_text"),
    ("mixtral", "layers of linear attention (lightning attention), and multipliers of blocks", "minimax"),
    ("llama", "state-space layers (Mamba) in place of attention", "mamba falcon_mamba mamba2"),
    ("llama", "state-space layers (Mamba)", "bamba falcon_h1 zamba zamba2"),
    ("mixtral", "state-space layers (Mamba)", "jamba"),
    ("granitemoeshared", "state-space layers (Mamba)", "granitemoehybrid"),
    ("llama", "state-space layers (Mamba), layers of one block each, and feed-forward blocks without a gate", "nemotron_h"),
    ("qwen3", "layers of short convolutions", "lfm2"),
    ("qwen3", "layers of short convolutions, norms after each block, and a gate on attention", "lfm3"),
    ("qwen3_moe", "layers of short convolutions, layers without experts, and a router of sigmoid with a bias", "lfm2_moe"),
    ("gemma2", "recurrent layers (RG-LRU)", "recurrent_gemma"),
    ("llama", "recurrent layers in place of attention", "rwkv xlstm"),
    ("llama", "layers that are repeated with a state (hierarchical reasoning), and norms without weights", "hrm_text"),
    ("llama", "patches of bytes in place of tokens", "blt"),
    # Gemma 3n and 4
    ("gemma3", "embeddings by layer, several residual streams (AltUp), low-rank blocks (LAuReL), and keys that layers share",
     "gemma3n_text"),
    ("gemma3", "embeddings by layer, keys that layers share, other widths of heads in layers with full attention, and a scale "
     "of each layer", "gemma4_text gemma4_unified_text"),
    ("gemma3", "keys of another model, whose next tokens it proposes", "gemma4_assistant gemma4_unified_assistant"),
    ("gemma3", "learned logits by distance in place of rotary embeddings, short convolutions, and experts",
     "inkling_text inkling2_text"),
    # Code that comes with the models
    ("llama", "a table of its keys and tensors, which have names of their own", "exaone"),
    ("llama", "a table of its keys and tensors, in which queries, keys and values are one", "internlm2 qwen"),
    ("granite", "keys of its own for the multipliers (scale_emb, scale_depth, dim_model_base)", "minicpm"),
    ("glm", "a table of its keys and tensors, in which queries, keys and values are one", "chatglm"),
    # Models of more than text
    ("phi3", "adapters for images and speech", "phi4_multimodal"),
    ("llama", "codes of sound beside text", "moshi"),
    ("qwen2", "the names of a folder without text_config: save it again with transformers 5", "qwen2_vl qwen2_5_vl"),
    ("qwen3_moe", "tensors of experts with other axes", "qwen3_vl_moe_text"),
    ("llama", "an encoder, to which the decoder attends",
     "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart prophetnet "
     "trocr whisper"),
)
# fmt: on
# model_type -> (nearest family, what it lacks).
NOT_SUPPORTED = {kind: (nearest, lacks) for nearest, lacks, kinds in GROUPS for kind in kinds.split()}
