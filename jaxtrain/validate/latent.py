"""Check the keys of multi-head latent attention, and of dense layers before a stack with experts."""

from collections.abc import Iterable

from jaxtrain.config import Model, Problem, RunConfig

# Keys that are read only with model.kv_lora_rank.
OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NEEDED = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Keys of attention without latents. Latent attention does not support them.
WITHOUT = ("qk_norm", "qkv_bias", "attention_out_bias", "attention_sinks", "local_rope_base")


def check_latent(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of the keys of latent attention and of dense layers. bad: keys that have an invalid value."""
    m = run.model
    if not bad & {f"model.{name}" for name in ("kv_lora_rank", *OF_LATENT, "head_dim")}:
        yield from _latent(m) if m.kv_lora_rank else _unread(m, OF_LATENT, "kv_lora_rank")
    if not bad & {f"model.{name}" for name in ("dense_layers", "dense_d_ff", "num_layers", "num_experts")}:
        yield from _dense(m) if m.dense_layers else _unread(m, ("dense_d_ff",), "dense_layers")


def _unread(m: Model, names: Iterable[str], needed: str) -> Iterable[Problem]:
    for name in names:
        if value := getattr(m, name):
            yield Problem(f"model.{name}", value, f"is read only with model.{needed}, which is 0", f"Set it to 0, or {needed}.")


def _latent(m: Model) -> Iterable[Problem]:
    missing = [name for name in NEEDED if not getattr(m, name)]
    for name in missing:
        yield Problem(f"model.{name}", 0, "is needed with model.kv_lora_rank", "DeepSeek-V3 has 128, 64 and 128.")
    if missing:
        return
    width = m.qk_nope_head_dim + m.qk_rope_head_dim
    if m.qk_rope_head_dim % 2:
        yield Problem("model.qk_rope_head_dim", m.qk_rope_head_dim, "must be even: rotary turns pairs of numbers", "Set 64.")
    elif m.head_dim != width:
        rule = f"must be qk_nope_head_dim + qk_rope_head_dim = {width} with model.kv_lora_rank"
        yield Problem("model.head_dim", m.head_dim, rule, "Set 0.")
    if m.v_head_dim > width:
        rule = f"is above the width of a key's head, {width}, which kernels do not do"
        yield Problem("model.v_head_dim", m.v_head_dim, rule, f"Set {width} or less.")
    if m.num_kv_heads != m.num_heads:
        rule = f"each of the model.num_heads = {m.num_heads} heads has keys of its own with model.kv_lora_rank"
        yield Problem("model.num_kv_heads", m.num_kv_heads, rule, f"Set {m.num_heads}.")
    for name in WITHOUT:
        if value := getattr(m, name):
            yield Problem(f"model.{name}", value, "latent attention is built without it", "Set it to its default.")


def _dense(m: Model) -> Iterable[Problem]:
    if not m.num_experts:
        rule = "are layers without experts in a model that has some, and model.num_experts = 0"
        yield Problem("model.dense_layers", m.dense_layers, rule, "Set 0.")
    elif m.dense_layers >= m.num_layers:
        rule = f"leaves no layer with experts of model.num_layers = {m.num_layers}"
        yield Problem("model.dense_layers", m.dense_layers, rule, f"Set {m.num_layers - 1} or less.")
    elif not m.dense_d_ff:
        yield Problem("model.dense_d_ff", 0, "is needed with model.dense_layers", "DeepSeek-V3 has 18432.")
    if m.attention_pattern:
        rule = "dense layers need a model whose layers all have the same attention"
        yield Problem("model.attention_pattern", m.attention_pattern, rule, "Set '', or model.dense_layers to 0.")
