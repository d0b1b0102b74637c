"""Wrong keys and options, the suggestions for them, and the pages that list the flags of other trainers."""

import re
from pathlib import Path

import pytest

from benchmarks import migration
from jaxtrain import main
from jaxtrain.commands.command import read_line
from jaxtrain.config import launch
from jaxtrain.config.schema import declared, default_config, flatten
from jaxtrain.config.synonyms import COMMON, INDEX, MOST, PEERS, nearest_keys
from jaxtrain.models.activations import ACTIVATIONS

REPO = Path(__file__).resolve().parents[2]
KEYS = list(declared())
MIGRATION = migration.PAGE.read_text()

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


def test_nine_in_ten_wrong_keys_are_answered_with_the_right_one():
    answers = {wrong: nearest_keys(wrong, KEYS) for wrong, _ in PAIRS}
    assert len(PAIRS) >= 60 and not {*answers} & {*KEYS}
    assert sum(right in answers[wrong] for wrong, right in PAIRS) >= 0.9 * len(PAIRS)
    assert sum(answers[wrong][:1] == [right] for wrong, right in PAIRS) >= 0.9 * len(PAIRS)
    assert max(map(len, answers.values())) <= MOST


@pytest.mark.parametrize("key", ["foo.bar", "remat.mode", "qqq"])
def test_a_key_that_is_near_to_none_is_answered_with_those_of_its_section(key):
    assert nearest_keys(key, KEYS) == []
    (problem,) = launch.apply(default_config(), key, "1")
    section = key.partition(".")[0] + "."
    assert (section in problem.remedy) == any(known.startswith(section) for known in KEYS)


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
        settings = [s.replace("./run.sh ", "python -m jaxtrain ") for s in re.findall(r"`([^`]+)`", ours) if s != "./run.sh"]
        theirs = re.sub(r"\((now )?`[^)]*\)", "", theirs)
        names = [re.split("[ =]", name)[0].lstrip("-").replace("-", "_") for name in re.findall(r"`([^`]+)`", theirs)]
        found += [(name, settings) for name in names if settings and re.fullmatch(r"[a-z][a-z0-9_.]*", name)]
    return found


def test_the_table_holds_the_names_of_the_page():
    """Each name of the page is in the table, with keys of its rows. Each name of the table is on the page. A name that is
    itself a key is none of the table's, unless the page has it.
    """
    page: dict[str, set[str]] = {}
    for name, settings in names_of_page():
        page.setdefault(name, set()).update(s.partition("=")[0] for s in settings)
    assert len(page) > 250
    ours = {setting for settings in page.values() for setting in settings}
    others = (*ACTIVATIONS, "custom", "wsd", "CUDA_VISIBLE_DEVICES")  # values, and a variable
    assert not [name for name in ours if name not in (*KEYS, *others) and not name.startswith(("--", "python -m", "./run"))]
    table: dict[str, set[str]] = {}
    for setting, names in PEERS.items():
        for name in names.split():
            table.setdefault(name, set()).add(setting.partition("=")[0].removesuffix(" --config"))
    assert not {name for name in page if name not in table and name not in KEYS and not name.endswith(".py")}
    assert not {name: table[name] - page.get(name, set()) for name in table if table[name] - page.get(name, set())}
    assert not [name for name in INDEX if name in KEYS and name not in page]


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


# ---- docs/migration.md: its table is the one that benchmarks.migration writes


def test_the_table_of_the_page_is_up_to_date():
    assert migration.page() == MIGRATION, "run: python -m benchmarks.migration --write"
    assert len(MIGRATION.encode()) <= 6 * 1024
    assert [s for s in migration.SETTINGS if s not in KEYS] == [migration.DERIVED, "--workdir"]
    assert not [name for name in migration.USUAL if f"`{name}`" not in MIGRATION]


def test_a_flag_of_the_table_is_answered_with_its_key():
    for setting in migration.SETTINGS:
        for trainer in migration.TRAINERS:
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
    assert {key: launch.parse(value, type(defaults[key])) for key, value in found.items()} == {k: defaults[k] for k in found}


def test_quoted_answers_are_printed():
    (block,) = re.findall(r"^```console\n(.*?)^```$", MIGRATION, re.MULTILINE | re.DOTALL)
    asked, *answers = block.splitlines()
    loaded = read_line(main.parser(), asked.split()[1:])
    assert [f"error: {problem}" for problem in loaded.problems] == answers
