"""Settings of other trainers with jaxtrain's key for each, and the nearest keys of a wrong key. Imports no jax."""

import difflib
import re
from collections.abc import Iterable, Sequence

from jaxtrain.config.commands import CONFIG

# Setting of jaxtrain -> names of other trainers, as docs/coming_from.md has them, without dashes. A test compares the two.
PEERS = {
    "precision": "training.mixed_precision_param model.converters dtype quantization fp8_format fp8_recipe",
    "precision=bf16": "bf16 bf16.enabled tf32 fp16",
    "precision=fp8": (
        "float8.recipe_name float8.enable_fsdp_float8_all_gather float8.precompute_float8_dynamic_scale_for_fsdp "
        "te_fp8_currentscaling fp8_param_gather zero_optimization.zero_quantized_weights torchao.float8 fp8_autocast fp8"
    ),
    "model.family": "model_type",
    "model.num_layers": "num_layers num_hidden_layers depth",
    "model.d_model": "hidden_size",
    "model.num_heads": "num_attention_heads",
    "model.num_kv_heads": "group_query_attention num_query_groups num_key_value_heads",
    "model.head_dim": "kv_channels head_dim",
    "model.d_ff": "base_moe_mlp_dim ffn_hidden_size moe_ffn_hidden_size intermediate_size moe_intermediate_size",
    "model.vocab_size": "vocab_size make_vocab_size_divisible_by",
    "model.norm_eps": "norm_epsilon rms_norm_eps",
    "model.tied_head": "tie_word_embeddings",
    "model.tied_head=false": "untie_embeddings_and_output_weights",
    "model.qk_norm": "qk_layernorm",
    "model.qkv_bias": "add_qkv_bias attention_bias",
    "model.attention_out_bias": "attention_bias",
    "model.sliding_window": "sliding_window_size window_size",
    "model.attention_pattern": "window_pattern",
    "model.attention_softcap": "attn_logits_soft_cap",
    "model.logit_softcap": "final_logits_soft_cap",
    "model.rope_base": "rope_max_timescale rotary_base rope_theta",
    "model.rope_scaling": "rope_scaling",
    "model.rope_scaling=llama3": "use_rope_scaling",
    "model.rope_factor": "rope_scaling_factor",
    "model.rope_original_len": "original_max_position_embeddings",
    "model.rope_beta_fast": "beta_fast",
    "model.rope_beta_slow": "beta_slow",
    "model.rope_mscale": "mscale",
    "model.rope_mscale_all_dim": "mscale_all_dim",
    "model.rope_attention_factor": "attention_factor",
    "model.num_experts": "num_experts num_local_experts",
    "model.experts_per_token": "top_k num_experts_per_tok moe_router_topk",
    "model.router": "score_func routed_score_func moe_router_score_function",
    "model.renormalize": "route_norm norm_topk_prob moe_router_pre_softmax",
    "model.router_bias": "routed_bias moe_router_enable_expert_bias",
    "model.dense_layers": "first_k_dense_replace first_num_dense_layers moe_layer_freq",
    "model.dense_d_ff": "first_k_dense_replace",
    "model.kv_lora_rank": "kv_lora_rank multi_latent_attention attention_type",
    "model.q_lora_rank": "q_lora_rank",
    "model.qk_nope_head_dim": "qk_nope_head_dim qk_head_dim",
    "model.qk_rope_head_dim": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.v_head_dim": "v_head_dim",
    "model.routed_scaling": "routed_scaling_factor moe_router_topk_scaling_factor",
    "model.router_groups": "n_group n_routing_groups moe_router_num_groups",
    "model.groups_per_token": "topk_group topk_routing_group moe_router_group_topk",
    "model.shared_d_ff": "num_shared_experts shared_experts moe_shared_expert_intermediate_size",
    "model.mtp_layers": "mtp_num_layers",
    "model.init_std": "init_method_std initializer_range",
    "mesh.data": (
        "parallelism.data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism "
        "num_distributed_optimizer_instances device_mesh mesh process_group init_device_mesh"
    ),
    "mesh.fsdp": (
        "parallelism.data_parallel_shard_degree ici_fsdp_parallelism dcn_fsdp_parallelism "
        "zero_optimization.mics_shard_size device_mesh mesh process_group init_device_mesh"
    ),
    "mesh.stage": (
        "parallelism.pipeline_parallel_degree ici_pipeline_parallelism dcn_pipeline_parallelism "
        "pipeline_model_parallel_size pipeline torch.distributed.pipelining"
    ),
    "mesh.expert": (
        "parallelism.expert_parallel_degree ici_expert_parallelism dcn_expert_parallelism expert_model_parallel_size "
        "expert_parallel.autoep_size"
    ),
    "mesh.tensor": (
        "parallelism.tensor_parallel_degree ici_tensor_parallelism ici_tensor_sequence_parallelism "
        "tensor_model_parallel_size tensor_parallel.autotp_size device_mesh mesh process_group init_device_mesh "
        "parallelize_module"
    ),
    "mesh.seq": (
        "parallelism.context_parallel_degree ici_context_parallelism context_parallel_size sequence_parallel_size "
        "context_parallel"
    ),
    "pipeline.schedule": "parallelism.pipeline_parallel_schedule torch.distributed.pipelining",
    "pipeline.groups": (
        "parallelism.pipeline_parallel_schedule num_layers_per_pipeline_stage num_pipeline_repeats "
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank torch.distributed.pipelining"
    ),
    "moe.impl": "megablox sparse_matmul use_tokamax_gmm",
    "moe.capacity_factor": "capacity_factor moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    "moe.buffer": "ragged_buffer_factor",
    "moe.balance_loss": ("load_balance_loss_weight moe_router_load_balancing_type moe_aux_loss_coeff router_aux_loss_coef"),
    "moe.sequence_balance_loss": "moe_router_load_balancing_type",
    "moe.z_loss": "moe_z_loss_coeff",
    "moe.bias_rate": "load_balance_coeff routed_bias_update_rate moe_router_bias_update_rate",
    "sharding.zero": "data_parallel_sharding_strategy zero_optimization.stage",
    "sharding.zero=1": "shard_optimizer_over_data use_distributed_optimizer",
    "sharding.zero=3": "use_megatron_fsdp use_torch_fsdp2",
    "sharding.gather": "reshard_after_forward parallelism.fsdp_reshard_after_forward",
    "sharding.gather=forward": "torch_fsdp2_no_reshard_after_forward",
    "sharding.gather=step": "pipeline_fsdp_ag_once",
    "sharding.rules.embed": "logical_axis_rules custom_mesh_and_rule shard_placement_fn",
    "attention.impl": "attn_backend model_registry attention attention_backend",
    "attention.impl=auto": "use_flash_attn",
    "attention.impl=cudnn": "scaled_dot_product_attention",
    "parallel.context": ("parallelism.context_parallel_rotate_method context_parallel_strategy cp_comm_type set_rotate_method"),
    "attention.ulysses": "ici_context_usp_ulysses_parallelism hierarchical_context_parallel_sizes",
    "remat.policy": (
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option remat_policy recompute_activations "
        "recompute_granularity recompute_method"
    ),
    "remat.policy=auto": "memory_budget",
    "remat.policy=custom": "create_selective_checkpoint_contexts",
    "remat.policy=full": (
        "deepspeed.checkpointing.checkpoint apply_activation_checkpointing checkpoint_wrapper torch.utils.checkpoint "
        "gradient_checkpointing"
    ),
    "remat.tensors": (
        "query_proj key_proj value_proj out_proj mlpwi_0 mlpwi_1 mlpwo context recompute_modules "
        "fine_grained_activation_offloading offload_modules activation_checkpointing.cpu_checkpointing save_on_cpu "
        "offload_wrapper create_selective_checkpoint_contexts"
    ),
    "remat.every": "recompute_num_layers",
    "dtypes.params": "training.dtype weight_dtype main_params_dtype",
    "dtypes.params=bf16": "bf16.bf16_master_weights_and_grads",
    "dtypes.m": "optimizer.implementation mu_dtype use_precision_aware_optimizer exp_avg_dtype",
    "dtypes.m=bf16": "bf16.bf16_optimizer_states",
    "dtypes.m=int8": "bitsandbytes",
    "dtypes.v": "optimizer.implementation use_precision_aware_optimizer exp_avg_sq_dtype",
    "dtypes.v=bf16": "bf16.bf16_optimizer_states",
    "dtypes.v=int8": "torchao",
    "dtypes.grads": "grad_dtype main_grads_dtype data_types.grad_accum_dtype",
    "dtypes.grads=bf16": "bf16.bf16_master_weights_and_grads keep_low_precision_grads",
    "dtypes.grads=f32": "accumulate_allreduce_grads_in_fp32",
    "dtypes.reduce": "training.mixed_precision_reduce communication_data_type reduce_dtype",
    "dtypes.reduce=bf16": "grad_reduce_in_bf16",
    "dtypes.reduce=f32": "accumulate_allreduce_grads_in_fp32",
    "fp8.exclude": "float8.filter_fqns",
    "data.source": (
        "training.dataset training.dataset_path dataset_type grain_train_files hf_path data_path train_file dataset_name"
    ),
    "data.source=synthetic": "mock_data",
    "data.eval_source": "validation.enable validator.enable split validation_file",
    "data.tokenizer": "model.hf_assets_path hf_assets_path tokenizer_path tokenizer_type tokenizer_model tokenizer_name",
    "data.seq_len": (
        "training.seq_len training.max_context_length max_target_length seq_length max_position_embeddings max_seq_length "
        "block_size max_seq_len"
    ),
    "data.packing": "packing",
    "data.packing=documents": "reset_position_ids reset_attention_mask eod_mask_loss",
    "data.packing=best_fit": "grain_packing_type",
    "data.max_segments": "max_segments_per_seq",
    "data.seed": "training.seed debug.seed data_shuffle_seed seed data_seed",
    "data.prefetch": (
        "grain_worker_count grain_prefetch_buffer_size num_workers data_cache_path dataloader_num_workers "
        "dataloader_prefetch_factor"
    ),
    "train.steps": ("training.steps steps train_iters train_samples scheduler.params.total_num_steps max_steps num_iterations"),
    "train.epochs": "num_train_epochs",
    "train.global_batch": (
        "training.global_batch_size training.num_tokens_per_train_step global_batch_size train_batch_size total_batch_size"
    ),
    "train.grad_accum": (
        "parallelism.num_pp_microbatches parallelism.pipeline_parallel_microbatch_size num_pipeline_microbatches "
        "gradient_accumulation_steps"
    ),
    "train.seed": "training.seed debug.seed init_weights_seed seed",
    "train.max_minutes": "exit_duration_in_mins",
    "train.loss_spike_sigma": "skip_step_on_spikes",
    "train.on_divergence": "abort_on_nan_loss abort_on_inf_loss rerun_mode",
    "train.max_skipped_steps": "abort_on_nan_loss abort_on_inf_loss no_check_for_nan_in_loss_and_grad",
    "train.deterministic": "training.deterministic debug.deterministic full_determinism",
    "train.deterministic=true": "deterministic_mode",
    "loss.mtp_weight": "mtp_loss_scaling_factor",
    "loss.name=dpo": "loss_type",
    "loss.beta": "beta",
    "loss.label_smoothing": "label_smoothing",
    "loss.z_loss": "z_loss_multiplier",
    "loss.chunk": "num_vocab_tiling vocab_tiling_ag_once",
    "optimizer.name": "optimizer.name opt_type optimizer optimizer.type optim",
    "optimizer.lr": "optimizer.lr learning_rate lr optimizer.params.lr matrix_lr",
    "optimizer.lr_min": "lr_scheduler.min_lr_factor learning_rate_final_fraction min_lr final_lr_frac",
    "optimizer.schedule": "lr_scheduler.decay_type lr_schedule_type lr_decay_style scheduler.type lr_scheduler_type",
    "optimizer.warmup_steps": (
        "lr_scheduler.warmup_steps warmup_steps_fraction lr_warmup_iters scheduler.params.warmup_num_steps warmup_steps "
        "warmup_ratio"
    ),
    "optimizer.decay_steps": (
        "lr_scheduler.decay_ratio learning_rate_schedule_steps wsd_decay_steps_fraction lr_decay_iters lr_wsd_decay_iters "
        "warmdown_ratio"
    ),
    "optimizer.weight_decay": "optimizer.weight_decay adam_weight_decay weight_decay optimizer.params.weight_decay",
    "optimizer.beta1": "optimizer.beta1 adam_b1 adam_beta1 optimizer.params.betas",
    "optimizer.beta2": "optimizer.beta2 adam_b2 adam_beta2 optimizer.params.betas",
    "optimizer.eps": "optimizer.eps adam_eps optimizer.params.eps adam_epsilon",
    "optimizer.clip_norm": (
        "training.max_norm gradient_clipping_threshold clip_grad gradient_clipping clip_grad_norm_ max_grad_norm"
    ),
    "optimizer.groups": "decoupled_lr embedding_lr unembedding_lr",
    "optimizer.offload=moments": (
        "training.enable_cpu_offload optimizer_memory_host_offload optimizer_cpu_offload zero_optimization.offload_optimizer"
    ),
    "init.from": (
        "checkpoint.initial_load_path checkpoint.initial_load_in_hf load_parameters_path finetune from_pretrained "
        "model_name_or_path"
    ),
    "init.what": "load_full_state_path",
    "init.what=weights": "checkpoint.initial_load_model_only no_load_optim no_load_rng",
    "lora.rank": "lora_r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules",
    "eval.every_steps": "validation.freq eval_interval eval_steps eval_strategy eval_every",
    "eval.sequences": "validation.steps eval_steps eval_iters eval_tokens",
    "checkpoint.dir": "checkpoint.folder save load",
    "checkpoint.every_steps": "checkpoint.interval checkpoint_period save_interval save_steps save_every",
    "checkpoint.keep": "checkpoint.keep_latest_k max_num_checkpoints_to_keep save_total_limit",
    "checkpoint.keep_every": "save_retain_interval",
    "checkpoint.step": "checkpoint.load_step ckpt_step resume_from_checkpoint resume_from_step",
    "log.every_steps": "metrics.log_freq log_period metrics_file log_interval log_throughput steps_per_print logging_steps",
    "log.tensorboard": "enable_tensorboard tensorboard_dir tensorboard csv_monitor",
    "log.tensorboard=true": "metrics.enable_tensorboard",
    "log.wandb": "metrics.enable_wandb enable_wandb wandb_project wandb report_to run",
    "sample.every_steps": "sample_every",
    "profile.start": (
        "profiling.enable_profiling profiling.profile_freq profiler.enable_profiling profiler "
        "skip_first_n_steps_for_profiler profile profile_step_start wall_clock_breakdown flops_profiler "
        "torch.profiler.profile"
    ),
    "profile.steps": "profiler_steps profile_step_end torch.profiler.profile",
    "profile.dump_hlo=true": "dump_hlo",
    "parallel.scan_layers": "scan_layers",
    "compiler.options": "training.disable_cuda_graphs cuda_graph_impl",
    "paths.cache": "jax_cache_dir",
    "--config=FILE": "model.name model.flavor",
    "--config=configs/llama3_8b.py": "model_name",
    "--workdir": "checkpoint.folder job.dump_folder dump_folder base_output_directory run_name save load output_dir",
    "python -m jaxtrain hf export": "checkpoint.last_save_in_hf save_pretrained",
    f"python -m jaxtrain plan {CONFIG} --topology=h200:8": (
        "memory_estimation.enable compile_topology compiled_trainstep_file comms_logger"
    ),
    f"python -m jaxtrain plan --search {CONFIG} --topology=h200:8": "autotuning",
}
# Setting of jaxtrain -> short names of no particular trainer, and names of other trainers for the batch of one device.
COMMON = {
    "precision": "mixed_precision compute_dtype",
    "model.num_layers": "layers n_layer n_layers num_layer nlayers blocks",
    "model.d_model": "dim n_embd embed_dim embedding_dim hidden_dim hidden width emb_dim model_dim",
    "model.num_heads": "heads n_head n_heads nheads",
    "model.num_kv_heads": "kv_heads n_kv_head n_kv_heads",
    "model.d_ff": "ffn_dim mlp_dim d_mlp ffn_hidden ff_dim intermediate_dim ffn_dim_multiplier",
    "model.head_dim": "d_head",
    "model.vocab_size": "vocab n_vocab padded_vocab_size",
    "model.norm_eps": "layer_norm_eps layernorm_epsilon rmsnorm_eps",
    "model.rope_base": "theta",
    "model.tied_head": "tie_embeddings tied_embeddings weight_tying",
    "model.family": "arch architecture",
    "model.experts_per_token": "topk",
    "mesh.data": "dp ddp data_parallel data_parallel_size dp_size dp_replicate replicas",
    "mesh.fsdp": "dp dp_shard fsdp_size data_parallel data_parallel_size",
    "mesh.tensor": "tp tp_size tensor_parallel tensor_parallel_size",
    "mesh.seq": "cp cp_size sp context sequence sequence_parallel",
    "mesh.stage": "pp pp_size pipeline_parallel pipeline_parallel_size stages",
    "mesh.expert": "ep ep_size expert_parallel expert_parallel_size",
    "sharding.zero": "zero zero_stage",
    "remat.policy": "activation_checkpointing activation_checkpoint checkpointing recompute remat",
    "attention.impl": "flash flash_attention attn_impl attn_implementation backend kernel",
    "data.source": "dataset data dataset_path path files train_path train_files train_data data_dir train_source",
    "data.source_schedule": "data_stages data_schedule annealing mixture_schedule source_weights data_weights",
    "data.eval_source": "val_source val_path eval_path eval_data eval_dataset val_data validation_data val_dataset",
    "data.seq_len": "seqlen sequence_length context_length ctx_len max_length max_len context_size n_ctx",
    "data.tokenizer": "tokenizer_file",
    "data.prefetch": "workers",
    "train.steps": "iters iterations max_iters num_iters num_steps total_steps train_steps max_train_steps",
    "train.epochs": "epochs num_epochs",
    "checkpoint.keep_best": "load_best_model_at_end save_best save_best_only metric_for_best_model",
    "train.global_batch": (
        "batch batch_size bs bsz tokens_per_batch micro_batch_size microbatch_size local_batch_size device_batch_size "
        "per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu"
    ),
    "train.grad_accum": (
        "gradient_accumulation grad_accumulation accumulation accumulation_steps grad_accum_steps accumulate_grad_batches "
        "microbatches num_microbatches"
    ),
    "optimizer.name": "algorithm",
    "optimizer.lr": "max_lr peak_lr lr_max",
    "optimizer.lr_min": "lr_end min_learning_rate final_lr end_lr min_lr_ratio",
    "optimizer.schedule": "lr_schedule scheduler lr_scheduler lr_decay",
    "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_steps num_warmup_steps lr_warmup",
    "optimizer.weight_decay": "wd",
    "optimizer.beta1": "b1 betas",
    "optimizer.beta2": "b2 betas",
    "optimizer.eps": "epsilon",
    "optimizer.clip_norm": "max_norm grad_clip grad_norm clip clip_grad_norm gradient_clip gradient_clip_val grad_norm_clip",
    "init.from": "init_from pretrained load_from load_path path checkpoint",
    "eval.every_steps": "interval freq frequency val_interval val_every validate_every eval_freq",
    "eval.sequences": "batches iters samples num_samples eval_batches val_steps",
    "checkpoint.every_steps": (
        "interval freq frequency save_freq save_interval_steps checkpoint_every checkpoint_interval checkpoint_freq"
    ),
    "checkpoint.keep": "max_to_keep keep_last keep_latest keep_last_n num_to_keep",
    "checkpoint.dir": "path folder ckpt_dir checkpoint_dir save_dir",
    "checkpoint.step": "resume load_step",
    "log.every_steps": "interval freq frequency log_every log_freq print_every print_freq logging_interval",
    "log.wandb": "use_wandb wandb_log",
    "log.tensorboard": "tb",
    "sample.every_steps": "interval freq",
    "sample.max_tokens": "max_new_tokens length",
    "lora.rank": "r",
    "lora.targets": "modules",
    "profile.start": "start_step",
    "profile.steps": "num_steps",
    "parallel.scan_layers": "scan scan_blocks",
    "paths.cache": "compile_cache compilation_cache cache_dir",
    "--workdir": "workdir out_dir out output logdir log_dir run_dir exp_dir experiment job_name",
}
# Sections of other trainers -> ours.
SECTIONS = {
    **dict.fromkeys(("training", "trainer"), "train"),
    **dict.fromkeys(("optim", "optimiser", "lr_scheduler", "scheduler"), "optimizer"),
    **dict.fromkeys(("parallelism", "distributed"), "mesh"),
    **dict.fromkeys(("validation", "validator", "evaluation", "val"), "eval"),
    **dict.fromkeys(("logging", "metrics"), "log"),
    **dict.fromkeys(("profiling", "profiler"), "profile"),
    **dict.fromkeys(("dataset", "dataloader"), "data"),
    **dict.fromkeys(("activation_checkpoint", "activation_checkpointing", "recompute"), "remat"),
    **dict.fromkeys(("ckpt", "checkpoints", "checkpointing"), "checkpoint"),
    **dict.fromkeys(("experts", "expert"), "moe"),
    "network": "model",
    "compile": "compiler",
    "float8": "fp8",
}
# Names whose numbers have another unit than ours: a fraction of the steps, tokens, the batch of one device.
OTHER_UNIT = re.compile("ratio|frac|factor|samples|token|device|micro|local|depth|total_batch")
MOST = 3  # candidates in one answer


def index() -> dict[str, list[str]]:
    """Return name of a setting in another trainer -> jaxtrain's settings for it."""
    found: dict[str, list[str]] = {}
    for table in (PEERS, COMMON):
        for setting, names in table.items():
            for name in names.split():
                found.setdefault(name, []).append(setting)
    return found


INDEX = index()


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return up to three settings that a wrong key may mean, the likeliest first; [] if no key is near.

    If keys of the typed section differ by one letter, they are the only results. Otherwise settings of the typed section come
    first: those for a name of another trainer, then related names (`_related`). If none is for a name of another trainer,
    such settings of other sections follow. If the typed section has no setting, keys of the same name follow. If there is no
    result, spelling decides.

    Args:
        key: the dotted key, as it was typed.
        known: all dotted keys of the config.
    """
    key = key.strip("-").replace("-", "_").lower()
    section, _, last = key.rpartition(".")
    tails = {name: name.rpartition(".")[2] for name in known}
    inside = [name for name in known if name.rpartition(".")[0] == _nearest_section(section, known)]
    slips = [name for name in inside if _distance(last, tails[name]) <= (1 if len(last) > 3 or not section else 0)]
    if slips:
        return slips[:MOST]
    meant = [*INDEX.get(key, ()), *INDEX.get(last, ())]
    here = [setting for setting in meant if setting.partition("=")[0] in inside]
    elsewhere = (
        [] if here else [s for s in meant if s.partition("=")[0] in known or s.partition(".")[0] not in _sections(known)]
    )
    related = [name for name in inside if _related(last, tails[name])]
    related.sort(key=lambda name: abs(len(tails[name]) - len(last)))
    same = [name for name in known if tails[name] == last and not name.startswith("sharding.rules.")]
    found = _unique([*here, *related, *elsewhere, *(() if here or related else same)])
    if found:
        return found[:MOST]
    spelt = [name for name in inside if tails[name] in difflib.get_close_matches(last, [tails[n] for n in inside], MOST)]
    names = difflib.get_close_matches(last, [*tails.values(), *INDEX], MOST, 0.85 if inside else 0.75)
    anywhere = [s for n in names for s in (*(k for k in known if tails[k] == n), *INDEX.get(n, ()))]
    return _unique([*spelt, *anywhere])[:MOST]


def did_you_mean(settings: Iterable[str]) -> str:
    """Return the question for some settings: "Did you mean A, B or C?"."""
    *first, last = settings
    return f"Did you mean {', '.join(first)} or {last}?" if first else f"Did you mean {last}?"


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Return the remedy for a wrong key: the nearest keys; if none, all keys of its section, or else the option --explain."""
    found = nearest_keys(key, known)
    if found:
        return did_you_mean(found)
    section = key.rpartition(".")[0]
    siblings = [name for name in known if section and name.rpartition(".")[0] == section]
    return f"Known: {', '.join(siblings)}." if siblings else "--explain lists all keys."


def _unique(settings: list[str]) -> list[str]:
    """Return the first setting of each key: "precision=bf16" and "precision" have the same key."""
    found: dict[str, str] = {}
    for setting in settings:
        found.setdefault(setting.partition("=")[0], setting)
    return list(found.values())


def _sections(known: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in known))


def _nearest_section(section: str, known: Sequence[str]) -> str:
    sections = _sections(known)
    if section in sections:
        return section
    first = SECTIONS.get(section.partition(".")[0])
    return first or next(iter(difflib.get_close_matches(section, sections, 1, 0.75)), section)


def _related(typed: str, tail: str) -> bool:
    """Return whether one name has all words of the other, or begins with it, or differs in two letters at most.

    Letters are compared only if `typed` has six or more.
    """
    a, b = typed.split("_"), tail.split("_")
    begins = min(len(typed), len(tail)) >= 3 and (typed.startswith(tail) or tail.startswith(typed))
    return set(a) <= set(b) or set(b) <= set(a) or begins or (len(typed) >= 6 and _distance(typed, tail) <= 2)


def _distance(a: str, b: str) -> int:
    """Return the number of letters to insert, remove, replace or swap with a neighbour to turn `a` into `b`."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, before, row = before, row, [i + 1]
        for j, y in enumerate(b):
            best = min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y))
            swapped = i and j and x == b[j - 1] and a[i - 1] == y
            row.append(min(best, last[j - 1] + 1) if swapped else best)
    return row[-1]
