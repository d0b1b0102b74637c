"""List every decoder-only model type of transformers, and what jaxtrain does with it: docs/evidence/model_types.md.

python -m benchmarks.model_types          print the page
python -m benchmarks.model_types --write  write docs/evidence/model_types.md

model_types.json has transformers' types, each with its class and, of a model that also sees or hears, the type of its text
part. tests/campaign/test_types_of_transformers.py compares it with transformers.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxtrain.models import FAMILIES
from jaxtrain.models.hugging_face import format_of
from jaxtrain.models.not_supported import NOT_SUPPORTED, SAME
from jaxtrain.report.tables import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "model_types.md"
STORED = Path(__file__).with_name("model_types.json")
HEAD = """# Model types of transformers

Every model type of transformers {version} with a class for causal language modelling, and what `hf import` does with it:
{accepted} are accepted, and {refused} are refused with the nearest family and what it lacks. `python -m benchmarks.model_types
--write` makes this page.

- Of a model that also sees or hears, the text part is taken. One line says how many other tensors and bytes are left out.
- "Under another name": the model computes text as the family does, with its keys and tensors; the refusal names the command.
- A type that is not here is refused with the family that knows most of its keys, and the keys which that family does not know.
"""


def family_of_type() -> dict[str, str]:
    """Return model_type -> family, of jaxtrain's families."""
    return {format_of(name).model_type: name for name in FAMILIES}


def accepted(kind: str, text: str = "") -> str:
    """Return the family that accepts a model type, or its text part; "" if none does. text: the type of its text part."""
    families = family_of_type()
    return families.get(kind, "") or families.get(text, "")


def refused(kind: str, text: str = "") -> tuple[str, str]:
    """Return (nearest family, what it lacks) of a model type that is refused.

    Raises:
      KeyError: neither the type nor its text part has an entry in not_supported.py.
    """
    named = next((x for x in (kind, text) if x in SAME), "")
    if named:
        return SAME[named], "nothing: it is under another name"
    return NOT_SUPPORTED[kind] if kind in NOT_SUPPORTED else NOT_SUPPORTED[text]


def page() -> str:
    """Return the page of the current tables."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    types = {kind: about.get("text", "") for kind, about in stored["types"].items()}
    taken = {kind: family for kind, text in types.items() if (family := accepted(kind, text))}
    others = {kind: refused(kind, text) for kind, text in types.items() if kind not in taken}
    head = HEAD.format(version=stored["transformers"], accepted=len(taken), refused=len(others))
    families = family_of_type()
    rows = [[f"`{kind}`", family, "" if kind in families else f"`{types[kind]}`"] for kind, family in taken.items()]
    refusals = [[f"`{kind}`", nearest, lacks] for kind, (nearest, lacks) in others.items()]
    return "\n".join(
        [
            head,
            "## Accepted\n",
            *markdown_table(["model_type", "family", "text part"], rows),
            "\n## Refused\n",
            *markdown_table(["model_type", "nearest family", "it lacks"], refusals),
            "",
        ]
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.model_types", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/evidence/model_types.md")
    return out


def main() -> int:
    """Print the page; with --write, write it to docs/evidence/model_types.md."""
    if parser().parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
