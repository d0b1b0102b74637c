"""Continue a text with a trained model, or talk to it: `python -m jaxtrain sample --workdir=runs/tiny --prompt="def "`."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, schema, stores
from jaxtrain.config.command_line import Args, Invalid, Parser, at_least
from jaxtrain.config.declaration import Key
from jaxtrain.config.schema import Problem, all_keys
from jaxtrain.data.chat_template import BUILTIN_TEMPLATES, Conversation
from jaxtrain.data.documents import PrepareError, read_questions
from jaxtrain.data.rows import parse_question
from jaxtrain.metrics.samples import Sampling, split_prompts
from jaxtrain.runtime.startup import start_jax

if TYPE_CHECKING:
    from jaxtrain.train.generation import LoadedModel


def _in_range(key: Key) -> Callable[[str], float]:
    """Return a type of options: numbers in a declared range."""

    def parse_number(text: str) -> float:
        value = float(text)
        if problem := key.out_of_range(value):
            raise Invalid(problem[0])
        return value

    return parse_number


RUN_DEFAULT = "default: as in the run's config"


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "sample",
        "Continue a text with a trained model; with --chat, answer conversations.",
        modes=("chat",),
        examples=(
            '--workdir=runs/tiny --prompt="def "',
            "--workdir=runs/chat --chat",
            "--workdir=runs/chat --chat --input=chat.jsonl",
        ),
        notes="Exit codes: 0 done; 2 the command is wrong, or there is no checkpoint that can be read.",
    )
    cli.option("workdir", "a run's folder, or one of its checkpoints/<step>", "DIR", example="runs/tiny", required=True)
    cli.option("prompt", f"the text to continue; several are separated by || ({RUN_DEFAULT})", "TEXT")
    cli.option("chat", "answer the prompt, or the lines of a terminal, by the model's chat template; stop at the turn's end")
    cli.option("system", "with --chat: the system message", "TEXT", modes=("chat",))
    cli.option("input", "with --chat: answer the conversations of a file, beside its own last answers", "FILE", modes=("chat",))
    cli.option(
        "chat-template",
        f"with --chat: {', '.join(BUILTIN_TEMPLATES)}, or a Jinja template (default: the model's own)",
        "NAME|FILE",
        modes=("chat",),
    )
    cli.option("max-tokens", f"tokens to generate at most ({RUN_DEFAULT})", "N", type=at_least(1))
    cli.option(
        "temperature",
        f"0: the most likely token ({RUN_DEFAULT})",
        "T",
        type=_in_range(all_keys()["sample.temperature"]),
        example="0.8",
    )
    mass = Key("", above=0, at_most=1)
    cli.option("top-p", f"probability mass to draw from (default: {Sampling.top_p})", "P", type=_in_range(mass), example="0.9")
    cli.option("seed", f"seed of the draws (default: {Sampling.seed})", "N", type=at_least(0))
    cli.option("tokenizer", "the tokenizer's present path, if it moved since training", "PATH")
    cli.option("base", "of a run with adapters: the base model's present path, if it moved", "DIR")
    cli.option("ema", "use the average of the weights (train.ema_decay)")
    return cli


SAMPLING_OPTIONS = ("prompt", "max_tokens", "temperature", "top_p", "seed")  # options that are attributes of Sampling


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    # ValueError is raised for a layout that is impossible on these devices.
    return run_command(parser(), argv, _act, check=_find_problems, errors=(CheckpointError, PrepareError, ValueError))


def _find_problems(args: Args) -> list[Problem]:
    rule, _, remedy = stores.missing_folder(args.workdir).partition(". ") if args.workdir else ("", "", "")
    problems = [Problem("--workdir", args.workdir, rule, remedy)] if rule else []
    if args.input and args.prompt:
        problems.append(Problem("--prompt", args.prompt, "--input has the questions already", "Leave one of them out."))
    return problems


def _act(args: Args) -> int:
    options = {name: getattr(args, name) for name in SAMPLING_OPTIONS if name.replace("_", "-") in args.explicit}
    questions = read_conversations(args) if args.chat else []  # a wrong file is an error before the model is read
    start_jax(hardware.probe())
    # Imported here: `--help` and wrong options must be fast, and the platform must be set before jax is imported.
    import jax

    from jaxtrain.data import text_format
    from jaxtrain.hf.importing import open_origin
    from jaxtrain.train.generation import Chat, load_model

    source = open_origin(args.workdir)
    spec = args.tokenizer or source.run().data.tokenizer
    chat = Chat(source.text(), spec, args.chat_template) if args.chat else None
    # A missing tokenizer is an error before the weights are read.
    tokenizer_and_format = text_format.load_with_tokenizer(source.text(), spec)
    model = load_model(args.workdir, jax.local_devices(), args.base, args.ema)
    defaults = model.run.sample  # a run that writes no samples has max_tokens = 0
    sampling = Sampling(defaults.prompt, defaults.max_tokens or schema.Sample().max_tokens, defaults.temperature)
    sampling = dataclasses.replace(sampling, **options)
    print(f"[{args.workdir.rstrip('/')}, step {model.step}]", file=sys.stderr)
    if chat is None:
        return continue_prompts(model, *tokenizer_and_format, sampling)
    printed: set[str] = set()

    def answer(conversation: Conversation) -> str:
        for message in conversation.messages:
            note = text_format.note_control_tokens(message["content"], chat.tokenizer, text_format.MESSAGE)
            if note and note not in printed:
                printed.add(note)
                print(f"note: {note}", file=sys.stderr)
        return chat.answer(model, conversation, sampling)

    if questions:
        answer_all(answer, questions)
    else:
        run_chat(answer, args.system)
    return 0


def continue_prompts(model: "LoadedModel", tokenizer: Any, text: Any, sampling: Sampling) -> int:
    """Print each prompt with its continuation, and return the exit code."""
    from jaxtrain.data import text_format
    from jaxtrain.train.generation import continue_all

    for note in filter(None, (text_format.note_control_tokens(prompt, tokenizer) for prompt in split_prompts(sampling.prompt))):
        print(f"note: {note}", file=sys.stderr)
    print(*continue_all(model.sampler, model.params, tokenizer, sampling, text.stops), sep="\n\n")
    return 0


def read_conversations(args: Args) -> list[tuple[Conversation, str]]:
    """Return (conversation to answer, reference answer or "") of the options; [] to read questions from standard input."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    if not args.input:
        texts = split_prompts(args.prompt) if args.prompt else []
        return [parse_question({"messages": [*system, {"role": "user", "content": text}]}) for text in texts]
    conversations = []
    for _, conversation, reference in read_questions(Path(args.input).expanduser()):
        messages = conversation.messages
        if system and messages[0]["role"] != "system":
            conversation = dataclasses.replace(conversation, messages=[*system, *messages])
        conversations.append((conversation, reference))
    if not conversations:
        raise PrepareError(f"--input = {args.input}: has no conversation")
    return conversations


def answer_all(answer_to: Callable[[Conversation], str], questions: Sequence[tuple[Conversation, str]]) -> None:
    """Print the answers; of several questions, or with reference answers, each below its question."""
    for number, (conversation, reference) in enumerate(questions):
        answer = answer_to(conversation)
        if len(questions) == 1 and not reference:
            print(answer)
            return
        shown = [f"[{message['role']}] {message['content']}" for message in conversation.messages]
        shown += [f"[answer] {answer}", *([f"[reference] {reference}"] if reference else [])]
        print(*(["", *shown] if number else shown), sep="\n", flush=True)


def run_chat(answer_to: Callable[[Conversation], str], system: str) -> None:
    """Answer the lines of standard input as one conversation, until it ends."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        print("Each line is a message. Ctrl-D ends the conversation.", file=sys.stderr)
    for line in read_lines():
        messages.append({"role": "user", "content": line})
        conversation, _ = parse_question({"messages": messages})
        answer = answer_to(conversation)
        print(answer, flush=True)
        if answer.strip():
            messages.append({"role": "assistant", "content": answer})
        else:  # no template writes an empty answer
            messages.pop()


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; on a terminal each after a prompt."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if text.strip():
            yield text
