"""Save fresh models that also see or hear, and their logits of text: `python whole_models.py TOKENS.npy DIR` writes DIR/NAME.

DIR/NAME/logits.npy has the logits. transformers 5 writes the names of transformers 4, or, in the folders NAME_new_names, those
of its own modules.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as t

SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SEES |= {"image_size": 28, "patch_size": 14}
HEARS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # a pad token has no gradient
NARROW = {"head_dim": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2}
LATENT |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_group": 1}
GEMMA = TEXT | NARROW | {"query_pre_attn_scalar": 16, "sliding_window": 7, "num_hidden_layers": 7}
QWEN_SEES = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14}
QWEN_TOKENS = {"image_token_id": 127, "video_token_id": 126, "vision_start_token_id": 125, "vision_end_token_id": 124}


def rope(*section, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(section), **more}}


def gemma3():
    ids = {"image_token_index": 127, "boi_token_index": 125, "eoi_token_index": 126}
    config = t.Gemma3Config(text_config=GEMMA, vision_config=SEES, mm_tokens_per_image=4, **ids)
    return t.Gemma3ForConditionalGeneration(config)


def like(kind, text_type, sees, more=None, **keys):
    """Return a model whose text part is of type text_type. more: keys of the text part."""
    text = TEXT | {"model_type": text_type} | (more or {})
    config = getattr(t, f"{kind}Config")(text_config=text, vision_config=sees, **keys)
    return getattr(t, f"{kind}ForConditionalGeneration")(config)


def got_ocr2():
    sees = SEES | {"output_channels": 16, "mlp_dim": 48, "global_attn_indexes": [1], "window_size": 2}
    return like("GotOcr2", "qwen2", sees, image_token_index=127)


def emu3():
    pictures = {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1]}
    pictures |= {"num_res_blocks": 1, "attn_resolutions": [1], "hidden_size": 32, "num_attention_heads": 1}
    text = TEXT | {"pad_token_id": 3, "attention_dropout": 0.0}
    return t.Emu3ForConditionalGeneration(t.Emu3Config(text_config=text, vq_config=pictures, vocabulary_map={"<image>": 127}))


def moss():
    hears = HEARS | {"num_mel_bins": 16, "max_source_positions": 50, "d_model": 32, "encoder_layers": 1}
    hears |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = t.MossTranscribeDiarizeConfig(
        text_config=TEXT | NARROW | {"model_type": "qwen3"}, audio_config=hears, audio_token_id=127
    )
    return t.MossTranscribeDiarizeForConditionalGeneration(config)


def voxtral():
    audio = HEARS | {"intermediate_size": 128, "num_mel_bins": 16, "max_source_positions": 50}
    config = t.VoxtralConfig(text_config=TEXT | NARROW | {"model_type": "llama"}, audio_config=audio, audio_token_id=127)
    return t.VoxtralForConditionalGeneration(config)


SIGLIP = SEES | {"model_type": "siglip_vision_model"}
CLIP = SEES | {"model_type": "clip_vision_model", "projection_dim": 16}
OF_QWEN2_5, OF_QWEN3 = {"fullatt_block_indexes": [1]}, {"deepstack_visual_indexes": [0]}
MODELS = {
    "gemma3": gemma3,
    "gemma3_new_names": gemma3,
    "llava": lambda: like("Llava", "llama", CLIP, image_token_index=127),
    "mistral3": lambda: like("Mistral3", "mistral", SEES | NARROW | {"model_type": "pixtral"}, NARROW, image_token_index=127),
    "llava_onevision": lambda: like("LlavaOnevision", "qwen2", SIGLIP, image_token_index=127, video_token_index=126),
    "internvl": lambda: like(
        "InternVL", "qwen3", SEES | {"image_size": [28, 28], "patch_size": [14, 14]}, NARROW, image_token_id=127
    ),
    "smolvlm": lambda: like("SmolVLM", "llama", SEES, image_token_id=127),
    "qwen2_5_vl": lambda: like("Qwen2_5_VL", "qwen2_5_vl_text", QWEN_SEES | OF_QWEN2_5, rope(2, 3, 3), **QWEN_TOKENS),
    "qwen3_vl": lambda: like(
        "Qwen3VL", "qwen3_vl_text", QWEN_SEES | OF_QWEN3, NARROW | rope(4, 2, 2, mrope_interleaved=True), **QWEN_TOKENS
    ),
    "kimi_k25_new_names": lambda: like("Kimi_K25", "deepseek_v3", SEES, LATENT, image_token_id=127),
    "got_ocr2": got_ocr2,
    "emu3": emu3,
    "moss_transcribe_diarize": moss,
    "voxtral": voxtral,
}


def main():
    torch.set_grad_enabled(False)
    rows, out = torch.from_numpy(np.load(sys.argv[1]).astype(np.int64)), Path(sys.argv[2])
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().float().eval()
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(out / name, save_original_format=not name.endswith("_new_names"))
        model.set_attn_implementation("eager")
        np.save(out / name / "logits.npy", model(rows, use_cache=False).logits.numpy())


if __name__ == "__main__":
    main()
