"""Arguments and variables of run.sh that concern the supervisor."""

import re
from collections.abc import Mapping

from jaxtrain.runtime.messages import Refusal
from jaxtrain.runtime.nodes import Nodes

PLACES = ("--coordinator", "--num-processes", "--process-id")
# With these options, main prints an answer and does not train.
ANSWERS = ("--help", "--explain", "--replay")


class Options:
    """The supervisor's options among the arguments of run.sh. `arguments` has the rest, for the trainer."""

    def __init__(self, words: list[str]):
        """Read the arguments of run.sh. Raises Refusal if an option of the supervisor is wrong."""
        self.arguments: list[str] = []
        self.preflight = True
        self.nodes: Nodes | None = None
        for word in words:
            name, equals, value = word.partition("=")
            if name == "--no-preflight":
                if equals:
                    raise Refusal(name, value, "takes no value", "--no-preflight")
                self.preflight = False
            elif name == "--nodes":
                if not equals:
                    raise Refusal(name, None, "needs a value", "--nodes=node1,node2")
                self.nodes = Nodes(value)
            else:
                self.arguments.append(word)
        for word in self.arguments if self.nodes else ():
            if word.startswith(PLACES):
                raise Refusal(word, None, "contradicts --nodes, which numbers the processes", "leave one of them out")

    @property
    def answers(self) -> bool:
        """Return whether the command only prints text (ANSWERS, such as --help) and does not train."""
        return any(word == "-h" or word.startswith(ANSWERS) for word in self.arguments)


def whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number in a variable, or `default` if it is unset. Raises Refusal for any other text."""
    text = environ.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise Refusal(name, text, "is no whole number from 0 to 999999", f"{name}={default}")
    return int(text)
