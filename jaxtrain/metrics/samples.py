"""samples.txt: texts that a model generated during training, each under a line with its step.

    --- step 200
    def main(self):
    --- step 400
    ...

With several prompts the line has the number of the prompt: `--- step 200, prompt 2`. If a line of a text looks like such a
heading, a space is written before it. So the file can be read back. This module opens no file.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SEPARATOR = "||"  # between the prompts of sample.prompt
HEADING = re.compile(r"^--- step (\d+)(?:, prompt (\d+))?\n", re.MULTILINE)


class TextSample(NamedTuple):
    """A generated text, with its prompt. `prompt` is the number of the prompt, from 1; 0 if there is only one prompt."""

    step: int
    prompt: int
    text: str


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The text to continue, or several (`split_prompts`), and how."""

    prompt: str
    max_tokens: int
    temperature: float  # 0: always the likeliest token
    top_p: float = 0.95  # tokens are drawn from the likeliest ones whose probabilities sum to this
    seed: int = 0


def split_prompts(text: str) -> list[str]:
    """Return the prompts of `sample.prompt`, which SEPARATOR separates."""
    return text.split(SEPARATOR)


def format_samples(samples: Iterable[TextSample]) -> str:
    """Return samples as text for samples.txt."""
    return "".join(
        f"--- step {s.step}{f', prompt {s.prompt}' if s.prompt else ''}\n{HEADING.sub(lambda m: ' ' + m[0], s.text + chr(10))}"
        for s in samples
    )


def parse_samples(text: str) -> Iterator[TextSample]:
    """Yield the samples of a samples.txt. Text before the first heading is ignored."""
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends, strict=False):  # without a heading there is one newline too many
        body = text[heading.end() : end]
        yield TextSample(int(heading[1]), int(heading[2] or 0), body.removesuffix("\n"))
