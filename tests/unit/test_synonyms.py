"""Wrong keys and options, the suggestions for them, and the pages that list the flags of other trainers."""

import re
from pathlib import Path

import pytest

from benchmarks import migration
from jaxtrain import main
from jaxtrain.commands.command import read_line
from jaxtrain.config import launch
from jaxtrain.config.schema import all_keys, default_config, flatten
from jaxtrain.config.synonyms import MOST, nearest_keys, other_trainers, synonym_index, synonym_pairs
from jaxtrain.data import loading

REPO = Path(__file__).resolve().parents[2]
KEYS = list(all_keys())
DATA = other_trainers()
MIGRATION = (REPO / "docs" / "migration.md").read_text()

# The setting that a user means, and wrong keys for it: slips, names of the section, and names of other trainers.
MEANT = """
train.steps                 train.step train.max_steps training.steps steps num_iterations train-iters
train.epochs                num_train_epochs train.num_epochs epochs
eval.every_steps            eval.every eval_every eval.steps
log.every_steps             log.every log.interval metrics.log_freq logging_steps
train.global_batch          train.batch_size training.local_batch_size data.batch_size total_batch_size global-batch-size
optimizer.weight_decay      optimizer.wd optimizer.decay
optimizer.lr_min            optimizer.min_lr lr_scheduler.min_lr_factor
model.d_model               model.hidden_size model.dim modle.d_model
model.num_layers            model.layers model.num_layer model.n_layers depth
checkpoint.every_steps      checkpoint.interval checkpoint.save_every
data.source                 data.path data.dataset
mesh.data                   mesh.dp
optimizer.lr                optimizer.learning_rate lr train.lr optim.lr optimiser.lr optimizer.lrr
data.seq_len                train.seq_len data.sequence_length max_target_length seq-length
optimizer.warmup_steps      optimizer.warmup warmup_stps
optimizer.beta1             optimizer.betas
mesh.tensor                 mesh.tp parallelism.tensor_parallel_degree tensor-model-parallel-size
optimizer.clip_norm         optimizer.grad_clip training.max_norm max_grad_norm
checkpoint.keep             checkpoint.keep_latest_k save_total_limit
remat.policy                activation_checkpoint.mode recompute-granularity
remat.policy=full           gradient_checkpointing
--workdir                   base_output_directory output_dir
precision=bf16              bf16
model.rope_base             model.rope_theta
model.d_ff                  model.intermediate_size
sharding.zero               sharding.zreo
attention.impl              atention.impl
lora.rank                   lora.r
init.from                   init.path
"""
PAIRS = [(wrong, line.split()[0]) for line in MEANT.strip().split("\n") for wrong in line.split()[1:]]


def test_a_wrong_key_is_answered_with_the_right_one_first():
    answers = {wrong: nearest_keys(wrong, KEYS) for wrong, _ in PAIRS}
    assert len(PAIRS) >= 70 and not {*answers} & {*KEYS}
    assert [wrong for wrong, right in PAIRS if answers[wrong][:1] != [right]] == []
    assert max(map(len, answers.values())) <= MOST


@pytest.mark.parametrize("key", ["foo.bar", "remat.mode", "qqq"])
def test_a_key_that_is_near_to_none_is_answered_with_those_of_its_section(key):
    assert nearest_keys(key, KEYS) == []
    (problem,) = launch.apply_override(default_config(), key, "1")
    section = key.partition(".")[0] + "."
    assert (section in problem.remedy) == any(known.startswith(section) for known in KEYS)


def test_every_setting_of_the_data_is_a_key_with_a_value_that_it_takes():
    rows = [row for topics in DATA["tables"].values() for topic in topics.values() for row in topic]
    assert len(rows) > 400
    for setting in [*DATA["short"], *(setting for row in rows for _, settings in synonym_pairs(row) for setting in settings)]:
        key, given, value = setting.partition("=")
        if not setting.startswith(("--", "./run.sh")):
            assert key in KEYS, setting
            assert not given or not launch.apply_override(default_config(), key, value), setting


def test_a_row_of_the_data_has_a_setting_for_each_name_or_one_of_four_words():
    for row in (row for topics in DATA["tables"].values() for topic in topics.values() for row in topic):
        groups, names = row[1].split(", "), len(list(synonym_pairs(row)))
        assert len(row) in (2, 3) and names % len(groups) == 0 or names == 1, row
        assert "`" in row[1] or row[1] in ("always", "derived", "needless", "not there"), row


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("adam_beta2", ["optimizer.beta2"]),  # the second of a row's names and settings
        ("debug.deterministic", ["train.deterministic=true"]),  # the fourth name, the second setting
        ("device_mesh", ["mesh.data", "mesh.fsdp", "mesh.tensor"]),  # settings that belong together
        ("bf16", ["precision=bf16"]),
        ("weight_dtype", ["dtypes.params"]),  # the row's name has a value
        ("zero_optimization.stage", ["sharding.zero"]),  # four values
        ("sample.top_p", ["python -m jaxtrain sample --top-p=P"]),
        ("comms-logger", ["python -m jaxtrain plan --config=FILE --topology=h200:8"]),
    ],
)
def test_a_name_of_a_row_is_answered_with_its_own_settings(name, answers):
    assert nearest_keys(name, KEYS)[: len(answers)] == answers


def test_only_a_wrong_key_reads_the_data():
    synonym_index.cache_clear()
    other_trainers.cache_clear()
    for option, reads in (("--config.train.steps=3", 0), ("--config.train.setps=3", 1)):
        assert len(loading.load_config([f"--config={REPO}/configs/tiny.py", option]).problems) == reads
        assert other_trainers.cache_info().misses == reads


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--train.steps=10"], "--config.train.steps=10"),
        (["--train.step", "10"], "--config.train.steps=10"),
        (["--log.tensorboard"], "--config.log.tensorboard"),
        (["--learning-rate", "1e-3"], "--config.optimizer.lr=1e-3"),
        (["--bf16"], "--config.precision=bf16"),
        (["--output_dir=out"], "--workdir=out"),
        (["--micro-batch-size=4"], "--config.train.global_batch=VALUE"),
        (["--eval_steps=4"], "--config.eval.every_steps=4 or --config.eval.sequences=4"),
        (["--workdr=x"], "--workdir"),
        (["--expl"], "--explain"),
        (["--attention_dropout=0.1"], "optimizer.weight_decay"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_key(argv, answer):
    (problem,) = read_line(main.parser(), argv).problems
    assert problem.key == argv[0].partition("=")[0] and re.search(f"{answer}(?![=.\\w])", problem.remedy)


# ---- docs/coming_from.md and docs/migration.md: their tables are those that benchmarks.migration writes


@pytest.mark.parametrize("path", migration.PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_up_to_date(path):
    assert migration.page(path) == path.read_text(), "run: python -m benchmarks.migration --write"


def test_each_table_is_on_a_page_once():
    text = "".join(path.read_text() for path in migration.PAGES)
    assert {text.count(table) for table in migration.tables().values()} == {1}
    assert len(MIGRATION.encode()) <= 6 * 1024
    assert [s for s in migration.FLAGS["settings"] if s not in KEYS] == [migration.DERIVED, "--workdir"]
    assert not [name for name in migration.FLAGS["usual"] if f"`{name}`" not in MIGRATION]


def test_a_flag_of_the_table_is_answered_with_its_key():
    for setting in migration.FLAGS["settings"]:
        for trainer in migration.FLAGS["trainers"]:
            cell = migration.flag(trainer, setting)
            no_flag = (setting.startswith("mesh.") and trainer != "MaxText") or setting.startswith("train.g")
            assert cell or no_flag, (setting, trainer)
            for name in re.findall(r"`([^`]+)`", cell):
                answers = [answer.partition("=")[0] for answer in nearest_keys(name, KEYS)]
                right = "train.global_batch" if setting == migration.DERIVED else setting
                assert name in KEYS or right in answers, (setting, trainer, name)


def test_defaults_of_the_page_are_those_of_the_config():
    _, _, rest = MIGRATION.partition("## Difference 2: defaults")
    found = dict(re.findall(r"`([a-z_.]+)=([^`]+)`", rest.partition("## Difference 3")[0]))
    defaults = dict(flatten(default_config()))
    assert len(found) >= 8
    assert {key: launch.parse_value(value, type(defaults[key])) for key, value in found.items()} == {
        k: defaults[k] for k in found
    }


def test_quoted_answers_are_printed():
    (block,) = re.findall(r"^```console\n(.*?)^```$", MIGRATION, re.MULTILINE | re.DOTALL)
    asked, *answers = block.splitlines()
    loaded = read_line(main.parser(), asked.split()[1:])
    assert [f"error: {problem}" for problem in loaded.problems] == answers
