"""README and docs are correct: links and file names exist, and commands can be parsed.

tests/campaign/test_doc_commands.py runs the commands of ```bash blocks. Commands in ```text blocks, and in the docstrings of
config files, need GPUs or the network: their configs are checked against the properties of a node of eight GPUs.
"""

import argparse
import ast
import dataclasses
import functools
import itertools
import os
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    attention_tiles,
    collective_volumes,
    command_reference,
    data_rates,
    expert_tiles,
    file_tree,
    first_minutes,
    import_memory,
    limits,
    migration,
    numerics,
    peer_maxtext,
    peer_torch,
    pictures,
    published,
    ragged_dot,
    what_fits,
)
from jaxtrain import environment, explain, launch, lm_eval, main
from jaxtrain.activations import ACTIVATIONS, POLICIES
from jaxtrain.bench import __main__ as bench
from jaxtrain.bench import train_step
from jaxtrain.checkpoint import __main__ as checkpoint
from jaxtrain.config import RunConfig, flatten, to_dict
from jaxtrain.data import __main__ as data
from jaxtrain.hardware import Devices
from jaxtrain.hf import __main__ as hugging_face
from jaxtrain.parity import __main__ as parity
from jaxtrain.parity import layouts as parity_layouts
from jaxtrain.plan import __main__ as plan
from jaxtrain.preflight import __main__ as preflight
from jaxtrain.profile import __main__ as profile
from jaxtrain.receipt import __main__ as receipt
from jaxtrain.report import __main__ as report
from jaxtrain.resume import markdown as resume_table
from jaxtrain.validate import validate

REPO = Path(__file__).resolve().parents[2]
PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
OF_BENCHMARKS = (
    attention_tiles,
    collective_volumes,
    command_reference,
    data_rates,
    expert_tiles,
    file_tree,
    first_minutes,
    import_memory,
    limits,
    migration,
    peer_maxtext,
    pictures,
    published,
    ragged_dot,
    what_fits,
)
PARSERS: dict[str, Any] = {f"benchmarks.{module.__name__.split('.')[-1]}": module for module in OF_BENCHMARKS}
PARSERS |= {"data": data, "checkpoint": checkpoint, "hf": hugging_face}
NODE = Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)


def blocks(path: Path, language: str) -> list[str]:
    """Return the contents of a page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the command lines in a text, with continued lines joined."""
    lines = [line.strip() for line in text.replace("\\\\\n", "\\\n").replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in lines]
    return [
        line
        for line in lines
        if line.startswith(("./run.sh", "python -m jaxtrain", "python -m benchmarks", ".venv/bin/python", "hf "))
    ]


def all_commands() -> list[tuple[str, str, str]]:
    """Return (page or config file, language of the block, command) for every command."""
    found = [(p.name, kind, c) for p in PAGES for kind in ("text", "bash") for b in blocks(p, kind) for c in commands(b)]
    for path in sorted((REPO / "configs").glob("*.py")):
        found += [(path.name, "text", c) for c in commands(path.read_text().split('"""')[1])]
    return found


def first_of_a_line(command: str) -> list[str]:
    """Return the words of a command line up to the first operator of the shell."""
    read = shlex.shlex(command, posix=True, punctuation_chars=";&|<>")
    read.whitespace_split, read.commenters = True, ""
    return list(itertools.takewhile(lambda word: word.strip(";&|<>"), read))


def parsed(words: list[str]) -> list[Any]:
    """Return the problems of a command line of a module or of run.sh, [] if it can be parsed. main's config is not checked."""
    name, *words = words
    if name in PARSERS:
        PARSERS[name].parser().parse_args(words)
    elif name == "benchmarks.numerics":
        return launch.load(words, numerics.OPTIONS).problems
    elif name == "lm_eval":
        return [] if "--tasks" in " ".join(lm_eval.parser().parse_known_args(words)[1]) else ["no --tasks"]
    elif name == "plan":
        asked = plan.COMMAND.parse(words)
        return [*asked.problems, *plan._check(asked)]
    elif name == "benchmarks.peer_torch":
        return peer_torch.COMMAND.parse(words).problems
    elif name == "bench":
        asked = bench.COMMAND.parse(words)
        cases, wrong = train_step.make_cases(asked.config.launch.config_argv, "", asked.options["sweep"])
        problems = [*asked.problems, *bench.find_problems(asked), *wrong]
        return problems + [p for argv in cases.values() for p in launch.load(argv).problems]
    elif name == "parity":
        asked = parity.COMMAND.parse(words)
        _, problems = parity_layouts.parse(asked.options["meshes"] or parity_layouts.DEFAULT)
        return [*asked.problems, *parity.find_problems(asked), *problems]
    elif name == "preflight":
        asked = preflight.COMMAND.parse(words)
        return [*asked.problems, *preflight.check_options(asked)]
    elif name == "profile":
        return profile.COMMAND.parse(words).problems
    elif name == "receipt":
        asked = receipt.COMMAND.parse(words)
        return [*asked.problems, *receipt.check(asked)]
    elif name == "report":
        return report.COMMAND.parse(words).problems
    elif name == "test":
        files = [word for word in words if "/" in word and not word.startswith("-")]
        return [file for file in files if not (REPO / file).exists()]
    else:  # commands without a parser of their own are run by the campaign
        return [] if name in ("hf download", "setup", "lint", "notebooks", "docs", "sample") else [f"what is {name}?"]
    return []


def mains_problems(words: list[str], runs_here: bool, folder: Path) -> list[str]:
    """Return the problems of a training command, apart from missing files.

    With `runs_here` only the command line is checked, since the command runs in a campaign. Otherwise the config is also
    validated for NODE.
    """
    parsed = main.COMMAND.parse(words)
    loaded = parsed.config
    variant = loaded.launch.variant
    gpus = re.search(r"gpus=(\d+)", variant)
    count = int(gpus[1]) if gpus else 1 if "half" in variant else NODE.count
    checked = [] if runs_here else validate(loaded.run, dataclasses.replace(NODE, count=count), folder)
    files = ("data.source", "data.eval_source", "data.tokenizer", "init.from", "--config", "--config=FILE:base")
    found = [*parsed.problems, *checked]
    return [str(p) for p in found if p.key not in files or not re.search("no such (file|folder)", p.rule)]


@pytest.mark.parametrize("page", sorted({page for page, *_ in all_commands()}))
def test_commands_of_a_page_can_be_parsed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands of ```bash blocks run on this machine in a campaign; all others are checked for a node of eight GPUs."""
    monkeypatch.chdir(REPO)
    for variable in environment.select_variables(os.environ):  # the described node must not see the suite's fake devices
        monkeypatch.delenv(variable)
    for kind, command in [(kind, command) for name, kind, command in all_commands() if name == page]:
        words = first_of_a_line(command)
        if words[0] == "./run.sh":
            words = [word for word in words[1:] if word != "--no-preflight" and not re.fullmatch(r"--nodes=[\w.,:@-]+", word)]
        else:
            words = ["hf download"] if words[:2] == ["hf", "download"] else [words[2].removeprefix("jaxtrain."), *words[3:]]
        if words and not words[0].startswith("-") and words[0] != "main":
            assert not parsed(words), command
        else:
            words = words[1:] if words[:1] == ["main"] else words
            assert not mains_problems(words, kind == "bash", tmp_path / "run"), command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, f"{page.name}: {target}; headings: {anchors}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_files_exist(page: Path):
    """The names are those in backticks that start with a folder of this repository."""
    roots = ("jaxtrain/", "configs/", "recipes/", "tests/", "docs/", "benchmarks/", "requirements/")
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        if name.startswith(roots):
            assert (REPO / name).exists(), f"{page.name}: {name}"


def settings() -> list[tuple[str, str]]:
    """Return (row, setting) for each setting in the second column of coming_from.md's tables."""
    rows = [line for line in (REPO / "docs" / "coming_from.md").read_text().splitlines() if line.startswith("| ")]
    return [(row, text) for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[2])]


def test_settings_for_people_from_elsewhere_exist():
    """Every key in coming_from.md exists, and the value beside it is valid. Options and commands are not checked."""
    keys = {key for key, _ in flatten(to_dict(RunConfig()))}
    other = ("--", "./run.sh", "python -m", "CUDA_VISIBLE_DEVICES")
    wrong = []
    for row, text in settings():
        key, given, value = text.partition("=")
        if key not in keys:
            wrong += [] if text.startswith(other) or key in (*ACTIVATIONS, "custom", "wsd") else [row]
        elif given and value not in ("hf:NAME", "package.module:name"):
            overrides = [f"--config.{text}"] + ["--config.remat.policy=custom"] * (key == "remat.tensors")
            overrides += ["--config.precision=fp8"] * (key == "fp8.exclude")
            if key == "attention.ulysses":
                overrides += ["--config.parallel.context=ulysses", "--config.mesh.seq=8"]
            loaded = launch.load(["--config=configs/llama3_8b.py", *overrides])
            found = [*loaded.problems, *validate(loaded.run, NODE, REPO / "runs" / "none")]
            wrong += [row for p in found if p.key == key and p.rule != "no such file"]
    assert not wrong
    assert len(settings()) > 200


def test_rows_without_a_setting_say_why():
    rows = [line for line in (REPO / "docs" / "coming_from.md").read_text().splitlines() if line.startswith("| `")]
    words = ("always", "derived", "needless", "not there")
    assert not [row for row in rows if "`" not in row.split("|")[2] and row.split("|")[2].strip() not in words]


# Part of a row of coming_from.md with a capability that is "not there" -> pattern of the name that it would have here.
NOT_THERE = {
    "enable_async_tensor_parallel": "async_tensor|decompos",
    "enable_fsdp_symm_mem": "symm",
    "parallelism.pipeline_parallel_schedule": "bubble|zb",
    "selective_ac_option": "every_other|alternate",
    "MXFP8LinearConverter": "mxfp8|nvfp4",
    "early_step_in_backward": "early_step|in_backward|fused_step",
    "lr_scheduler.decay_type": "sqrt",
    "comm.init_timeout_seconds": "init_timeout|trace_buf|flight_rec",
    "ici_fsdp_transpose_parallelism": "transpose|autoregressive",
    "pipeline_delay_activation_forwarding": "delay|layers_per",
    "use_ring_of_experts": "ring_of",
    "te_comm_gemm_overlap": "gemm_overlap",
    "enable_rampup_batch_size": "ramp",
    "parameter_memory_host_offload": "params_offload|offload_param|parameter_offload",
    "te_fp8_currentscaling": "delayed",
    "fused_qkv": "fused_(qkv|mlp)",
    "dropout_rate": "dropout",
    "enable_emergency_checkpoint": "emergency",
    "decoder-first-pipeline-num-layers": "first_pipeline|stage_layers|pipeline.layout",
    "tp-comm-overlap": "comm_overlap",
    "ddp-bucket-size": "bucket_size|nccl_ub",
    "--rampup-batch-size": "ramp",
    "recompute-method block": "recompute_layers|remat.layers",
    "optimizer-offload-fraction": "fraction_offload|offload_fraction",
    "--fp16": "fp16|float16|loss_scale",
    "fp8-format hybrid": "e5m2|hybrid|delayed|tensorwise",
    "attention-dropout": "dropout",
    "use-flash-attn": "flash",
    "token-dispatcher-type flex": "flex|deepep",
    "tools/checkpoint/convert.py": "megatron",
    "distributed-timeout-minutes": "distributed_timeout",
    "reduce_bucket_size": "bucket_size",
    "stage3_param_persistence_threshold": "persist",
    "zero_optimization.offload_param": "nvme|offload_param|params_offload",
    "zero_hpz_partition_size": "hpz|secondary",
    "zero_quantized_gradients": "quantized_grad",
    "fp16.enabled": "fp16|float16|loss_scale",
    "optimizer.type": "lamb|onebit",
    "comet": "comet",
    "elasticity": "elastic",
    "reshard_after_forward=8": "reshard",
    "ignored_modules": "ignored",
    "flash_attn": "flash",
    "ScheduleGPipe": "bubble|zb",
    "`tf32`": "fp16|float16",
    "lora_dropout": "dropout",
    "loss_type": "ipo|hinge|kto|orpo|simpo",
}


def names_of_jaxtrain() -> str:
    """Return jaxtrain's keys with their values, the options of its commands, and its modules, one a line."""
    docs = REPO / "docs"
    keys = [" ".join(row.split(" | ")[:4]) for row in (docs / "config.md").read_text().splitlines() if row.startswith("| `")]
    options = [row.split(" | ")[0] for row in (docs / "commands.md").read_text().splitlines() if row.startswith("| ")]
    modules = [str(p.relative_to(REPO)) for p in (REPO / "jaxtrain").rglob("*.py")]
    return "\n".join([*keys, *options, *modules]).lower().replace("-", "_")


def test_absent_capabilities_are_absent():
    """A row may call a capability "not there" only while no key, value, option or module has the capability's name."""
    page = (REPO / "docs" / "coming_from.md").read_text().splitlines()
    rows = [row for row in page if row.startswith("| ") and re.search(r"not there(?! \| jaxtrain)", row)]
    assert not [row for row in rows if not any(word in row for word in NOT_THERE)], "rows that no word of NOT_THERE describes"
    assert not [word for word in NOT_THERE if not any(word in row for row in rows)], "words of no row"
    known = names_of_jaxtrain()
    assert "muon" in known and "import" in known and "experts/pallas" in known
    assert {word: found.group() for word, pattern in NOT_THERE.items() if (found := re.search(f".*({pattern}).*", known))} == {}


def test_the_list_of_modules_is_up_to_date():
    assert file_tree.PAGE.read_text() == file_tree.page(), "run: python -m benchmarks.file_tree --write"


def test_the_list_of_commands_is_up_to_date(monkeypatch: pytest.MonkeyPatch):
    """docs/commands.md is the page that the current code writes, at any terminal width."""
    monkeypatch.setenv("COLUMNS", "40")
    assert command_reference.PAGE.read_text() == command_reference.page(), "run: python -m benchmarks.command_reference --write"


def test_the_list_of_commands_has_every_option_and_default():
    """Every option of --help is in docs/commands.md, though the page is not made from --help."""
    pages = command_reference.PAGE.read_text().split("\n## ")
    sections = {text.split("\n")[0]: text for text in pages}
    for name, module in (("plan", plan), ("parity", parity), ("main", main)):
        usages = re.findall(r"^  (--\S+)", module.COMMAND.help(), re.MULTILINE)
        rows = re.findall(r"^\| `(--\S+)` \|", sections[name], re.MULTILINE)
        assert [row.replace("\\|", "|") for row in rows] == [usage for usage in usages if usage != "--help"]
    assert "auto prefers the library; default `auto` |" in sections["plan"]
    assert "| `--dtype=auto\\|f32\\|bf16` |" in sections["hf"] and "| `--out=CKPT` | required: " in sections["hf"]
    for parser in (data.parser(), checkpoint.parser(), hugging_face.parser()):
        helped = set(re.findall(r"--[a-z][\w-]*", "".join(p.format_help() for p in with_subcommands(parser))))
        name = parser.prog.split()[-1].removeprefix("jaxtrain.")
        assert helped - {"--help"} <= set(re.findall(r"--[a-z][\w-]*", sections[name]))


def with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return a parser and the parsers of its subcommands."""
    under = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(child for action in under for child in action.choices.values())]


def test_the_site_lists_every_page_once():
    text = (REPO / "docs" / "index.md").read_text()
    (*trees, evidence) = re.findall(r"^```{toctree}\n(?::[^\n]*\n)+\n(.*?)```$", text, re.MULTILINE | re.DOTALL)
    pages = [path.stem for path in (*(REPO / "docs").glob("*.md"), *(REPO / "docs").glob("*.rst"))]
    assert sorted(["index", *"".join(trees).split()]) == sorted(pages)
    assert evidence == "evidence/*\n"


def test_a_page_of_evidence_is_called_an_estimate_unless_it_is_measured():
    conf = runpy.run_path(str(REPO / "docs" / "conf.py"))
    shown = {}
    for path in PAGES:
        name = str(path.relative_to(REPO / "docs").with_suffix("")) if path.is_relative_to(REPO / "docs") else path.stem
        source = [path.read_text()]
        conf["add_banner"](None, name, source)
        shown[name] = source[0].count(conf["BANNER"])
        assert source[0].replace(conf["BANNER"], "") == path.read_text()
        assert source[0].splitlines()[0] == path.read_text().splitlines()[0]
    evidence = {name for name in shown if name.startswith("evidence/")}
    measured = {f"evidence/{name}" for name in conf["MEASURED"]}
    assert measured < evidence
    assert {name for name, count in shown.items() if count == 1} == evidence - measured
    assert set(shown.values()) == {0, 1}


def test_a_module_is_described_by_its_first_sentence(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text('"""Ring attention (Liu et al. 2023, arXiv:2310.01889) in chunks.py. Causal.\n\nMore."""\n')
    assert file_tree.purpose(file) == "Ring attention in chunks.py"
    file.write_text(f'"""Short: {"long " * 30}."""\n')
    assert file_tree.purpose(file) == "Short"
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match="no docstring. Fix: "):
        file_tree.purpose(file)


def test_the_readme_is_short_and_leads_to_every_page():
    """The README has at most 10 KB. It links each page of docs, or a page that has a link to it."""
    text = (REPO / "README.md").read_text()
    assert len(text.encode()) <= 10_000
    linked = set(re.findall(r"\(docs/([\w.]+\.md)", text))
    others = {name for page in linked for name in re.findall(r"\]\(([\w.]+\.md)", (REPO / "docs" / page).read_text())}
    assert {p.name for p in (REPO / "docs").glob("*.md")} <= linked | others


REFERENCE = {"config.md", "commands.md", "modules.md", "coming_from.md", "presets.md", "migration.md"}
OF_CONTRIBUTORS = {"architecture.md", "testing.md"}


def test_the_pages_of_users_are_short():
    pages = [p for p in (REPO / "docs").glob("*.md") if p.name not in REFERENCE | OF_CONTRIBUTORS]
    assert sum(len(p.read_bytes()) for p in pages) <= 130_000


def test_generated_pages_are_up_to_date():
    assert (REPO / "docs" / "config.md").read_text() == explain.markdown(), (
        "run: python -m jaxtrain.main --explain=markdown > docs/config.md"
    )
    assert resume_table() in (REPO / "docs" / "checkpoints.md").read_text(), "paste jaxtrain.resume.markdown()"


def test_every_activation_and_policy_is_documented():
    page = (REPO / "docs" / "memory.md").read_text()
    assert not [name for name in (*ACTIVATIONS, *POLICIES) if f"`{name}`" not in page]


@functools.cache
def literals() -> str:
    """Return the strings of the package, docstrings excluded, a newline between two. A field of an f-string is a NUL."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(value) for value in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    nodes = [n for path in sorted((REPO / "jaxtrain").rglob("*.py")) for n in ast.walk(ast.parse(path.read_text()))]
    docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    return "\n".join(text(n) for n in nodes if isinstance(n, ast.JoinedStr | ast.Constant) and id(n) not in docstrings)


def constant_parts(message: str) -> list[str]:
    """Return the parts of a message that do not vary: those between `...`, and between key, value and rule."""
    parts = [part.strip(" .,;:()") for part in re.split(r"\.\.\.| = |: ", message)]
    return [part for part in parts if len(part) > 3]


def quoted_messages() -> list[str]:
    """Return the first column of the tables of troubleshooting.md."""
    return re.findall(r"^\| `([^`]+)` \|", (REPO / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", quoted_messages())
def test_messages_of_troubleshooting_occur_in_the_package(message: str):
    """Messages are quoted as the package prints them, because users search the page for a message."""
    parts = constant_parts(message)
    assert max(map(len, parts)) >= 9, "too short to find"
    assert not [part for part in parts if part not in literals()]


def test_a_message_that_no_code_prints_is_noticed():
    rows = re.findall(r"^\| `", (REPO / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted_messages()) == len(rows) >= 30
    assert [part for part in constant_parts("the run is ...: a message that no code prints") if part not in literals()]
