"""Wrong keys and options, and the suggestions for them."""

import re
from pathlib import Path

import pytest

from jaxtrain import launch
from jaxtrain.config import declared, default_config
from jaxtrain.synonyms import COMMON, INDEX, MOST, PEERS, nearest_keys

REPO = Path(__file__).resolve().parents[2]
KEYS = list(declared())

# A wrong key, and the setting that its user means.
WRONG = """
train.step                                      train.steps
eval.every                                      eval.every_steps
log.every                                       log.every_steps
train.batch_size                                train.global_batch
optimizer.wd                                    optimizer.weight_decay
optimizer.min_lr                                optimizer.lr_min
model.hidden_size                               model.d_model
train.max_steps                                 train.steps
model.layers                                    model.num_layers
checkpoint.interval                             checkpoint.every_steps
data.path                                       data.source
mesh.dp                                         mesh.data
optimizer.learning_rate                         optimizer.lr
model.num_layer                                 model.num_layers
lr                                              optimizer.lr
train.seq_len                                   data.seq_len
learning_rate                                   optimizer.lr
train.lr                                        optimizer.lr
optim.lr                                        optimizer.lr
optimizer.warmup                                optimizer.warmup_steps
optimizer.betas                                 optimizer.beta1
model.n_layers                                  model.num_layers
model.n_heads                                   model.num_heads
model.dim                                       model.d_model
mesh.tp                                         mesh.tensor
mesh.cp                                         mesh.seq
mesh.pp                                         mesh.stage
train.seeds                                     train.seed
data.sequence_length                            data.seq_len
data.dataset                                    data.source
log.interval                                    log.every_steps
optimizer.grad_clip                             optimizer.clip_norm
training.steps                                  train.steps
training.local_batch_size                       train.global_batch
training.max_norm                               optimizer.clip_norm
parallelism.tensor_parallel_degree              mesh.tensor
parallelism.data_parallel_shard_degree          mesh.fsdp
checkpoint.keep_latest_k                        checkpoint.keep
activation_checkpoint.mode                      remat.policy
metrics.log_freq                                log.every_steps
lr_scheduler.min_lr_factor                      optimizer.lr_min
per_device_batch_size                           train.global_batch
max_target_length                               data.seq_len
ici_fsdp_parallelism                            mesh.fsdp
remat_policy                                    remat.policy
base_output_directory                           --workdir
gradient_clipping_threshold                     optimizer.clip_norm
global-batch-size                               train.global_batch
train-iters                                     train.steps
seq-length                                      data.seq_len
tensor-model-parallel-size                      mesh.tensor
lr-warmup-iters                                 optimizer.warmup_steps
recompute-granularity                           remat.policy
num_train_epochs                                train.steps
per_device_train_batch_size                     train.global_batch
max_grad_norm                                   optimizer.clip_norm
logging_steps                                   log.every_steps
save_total_limit                                checkpoint.keep
output_dir                                      --workdir
gradient_checkpointing                          remat.policy=full
bf16                                            precision=bf16
model.rope_theta                                model.rope_base
model.intermediate_size                         model.d_ff
depth                                           model.num_layers
num_iterations                                  train.steps
total_batch_size                                train.global_batch
eval_every                                      eval.every_steps
modle.d_model                                   model.d_model
optimiser.lr                                    optimizer.lr
optimizer.lrr                                   optimizer.lr
sharding.zreo                                   sharding.zero
atention.impl                                   attention.impl
data.tokeniser                                  data.tokenizer
warmup_stps                                     optimizer.warmup_steps
precison                                        precision
seq_len                                         data.seq_len
grad_accum                                      train.grad_accum
steps                                           train.steps
lora.r                                          lora.rank
eval.steps                                      eval.every_steps
eval.iters                                      eval.sequences
checkpoint.save_every                           checkpoint.every_steps
data.batch_size                                 train.global_batch
sample.max_new_tokens                           sample.max_tokens
init.path                                       init.from
optimizer.decay                                 optimizer.weight_decay
"""
PAIRS = [tuple(line.split()) for line in WRONG.split("\n") if line]


def test_nine_in_ten_wrong_keys_are_answered_with_the_right_one():
    wrong = {key: nearest_keys(key, KEYS) for key, right in PAIRS if right not in nearest_keys(key, KEYS)}
    first = [key for key, right in PAIRS if nearest_keys(key, KEYS)[:1] == [right]]
    assert len(PAIRS) >= 60 and not {key for key, _ in PAIRS} & set(KEYS)
    assert len(wrong) <= 0.1 * len(PAIRS), wrong
    assert len(first) >= 0.9 * len(PAIRS)
    assert all(len(nearest_keys(key, KEYS)) <= MOST for key, _ in PAIRS)


@pytest.mark.parametrize("key", ["foo.bar", "remat.mode", "model.foo", "mesh.xyz", "qqq"])
def test_a_key_that_is_near_to_none_is_answered_with_none(key):
    assert nearest_keys(key, KEYS) == []
    (problem,) = launch.apply(default_config(), key, "1")
    section = key.partition(".")[0]
    listed = any(k.startswith(f"{section}.") for k in KEYS)
    assert problem.remedy.startswith(f"Known: {section}.") if listed else problem.remedy == "--explain lists all keys."


def test_every_synonym_is_a_key_with_a_value_that_it_takes():
    for setting in (*PEERS, *COMMON):
        key, given, value = setting.partition("=")
        if setting.startswith(("--", "python -m")):
            continue
        assert key in KEYS, setting
        assert not given or not launch.apply(default_config(), key, value), setting


def names_of_page() -> list[tuple[str, list[str]]]:
    """Return (name, settings of its row) for each name of docs/coming_from.md that looks like a key or an option."""
    found = []
    for row in (REPO / "docs" / "coming_from.md").read_text().splitlines():
        if not row.startswith("| "):
            continue
        _, theirs, ours, *_ = row.split("|")
        settings = [s.replace("./run.sh ", "python -m jaxtrain.") for s in re.findall(r"`([^`]+)`", ours) if s != "./run.sh"]
        theirs = re.sub(r"\((now )?`[^)]*\)", "", theirs)
        names = [re.split("[ =]", name)[0].lstrip("-").replace("-", "_") for name in re.findall(r"`([^`]+)`", theirs)]
        found += [(name, settings) for name in names if settings and re.fullmatch(r"[a-z][a-z0-9_.]*", name)]
    return found


def test_the_table_holds_the_names_of_the_page():
    """Each name of the page is in the table, with keys of its rows. Each name of the table is on the page."""
    page: dict[str, set[str]] = {}
    for name, settings in names_of_page():
        page.setdefault(name, set()).update(s.partition("=")[0] for s in settings)
    assert len(page) > 250
    table: dict[str, set[str]] = {}
    for setting, names in PEERS.items():
        for name in names.split():
            table.setdefault(name, set()).add(setting.partition("=")[0])
    left_out = {name for name in page if name not in table and name not in KEYS and not name.endswith(".py")}
    assert not left_out
    assert not {name: table[name] - page.get(name, set()) for name in table if table[name] - page.get(name, set())}


def test_names_of_the_table_are_no_keys():
    """A key is no wrong name. Only names on the page (docs/coming_from.md) may also be keys."""
    assert not [name for name in INDEX if name in KEYS and name not in dict(names_of_page())]


@pytest.mark.parametrize(
    ("argv", "key", "remedy"),
    [
        (["--train.steps=10"], "--train.steps", "Did you mean --config.train.steps=10?"),
        (["--train.steps", "10"], "--train.steps", "Did you mean --config.train.steps=10?"),
        (["--train.step=10"], "--train.step", "Did you mean --config.train.steps=10?"),
        (["--log.tensorboard"], "--log.tensorboard", "Did you mean --config.log.tensorboard?"),
        (["--learning_rate=1e-3"], "--learning_rate", "Did you mean --config.optimizer.lr=1e-3?"),
        (["--learning-rate", "1e-3"], "--learning-rate", "Did you mean --config.optimizer.lr=1e-3?"),
        (["--bf16"], "--bf16", "Did you mean --config.precision=bf16?"),
        (["--output_dir=out"], "--output_dir", "Did you mean --workdir=out?"),
        (["--micro-batch-size=4"], "--micro-batch-size", "Did you mean --config.train.global_batch=VALUE?"),
        (["--eval_steps=4"], "--eval_steps", "Did you mean --config.eval.every_steps=4 or --config.eval.sequences=4?"),
        (["--workdr=x"], "--workdr", "Did you mean --workdir?"),
        (["--expl"], "--expl", "Did you mean --explain?"),
        (["--attention_dropout=0.1"], "--attention_dropout", "Remove it; optimizer.weight_decay is the regulariser."),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_key(argv, key, remedy):
    (problem,) = launch.load(argv, {"workdir": ""}, {"explain": "text"}).problems
    assert (problem.key, problem.rule in ("no such option", launch.NO_DROPOUT), problem.remedy) == (key, True, remedy)
