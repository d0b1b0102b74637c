"""Which lines differ between the code of two runs, from the patches that their receipts keep."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

SHOWN = 40  # lines of a file


@dataclasses.dataclass(frozen=True)
class Edit:
    """A line that a patch takes away from a file or puts in, by the numbers of the commit's file.

    `line`: the one that goes, or that it is put in before; `nth` among those put in there. `block`: where this change begins.
    """

    line: int
    nth: int
    sign: str
    text: str
    block: int = dataclasses.field(compare=False)


def edits(patch: str) -> dict[str, list[Edit]]:
    """File -> what a patch (of git diff) changes in it."""
    out: dict[str, list[Edit]] = {}
    at, line, nth, block, left, added = "", 0, 0, 0, 0, 0
    for row in patch.split("\n"):
        hunk = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", row)
        if left > 0 or added > 0:  # inside a hunk: a removed line may look like a header
            sign, text = row[:1], row[1:]
            if sign == "\\":  # no newline at the end of the file
                continue
            if sign == "+":
                out[at].append(Edit(line, nth, "+", text, block))
                nth, added = nth + 1, added - 1
                continue
            if sign == "-":
                out[at].append(Edit(line, 0, "-", text, block))
                left -= 1
            else:
                left, added, block = left - 1, added - 1, line + 1
            line, nth = line + 1, 1
        elif hunk:
            left, added = (int(count) if count is not None else 1 for count in (hunk[2], hunk[3]))
            line = block = int(hunk[1]) + (left == 0)  # "-5,0": after line 5
            nth = 1
        elif named := re.match(r"(?:---|\+\+\+) [ab]/(.*?)\t?$", row):
            at = named[1]
            out.setdefault(at, [])
    return out


def lines_changed(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """How to get from A's version of a file to B's: "line 12: - x = 1", by the numbers of the commit that both stand on.

    Empty where the patches cannot tell: of different commits, or of a file that git does not track, or cut off.
    """
    if not a.get("commit") or a.get("commit") != b.get("commit") or a.get("patch_cut") or b.get("patch_cut"):
        return []
    before, after = (set(edits(side.get("patch") or "").get(name, [])) for side in (a, b))
    undone = [(e, "+" if e.sign == "-" else "-") for e in before - after]
    found = sorted(
        [*undone, *((e, e.sign) for e in after - before)], key=lambda f: (f[0].block, f[1] == "+", f[0].line, f[0].nth)
    )
    said = [f"line {e.block if e.sign == '+' else e.line}: {sign} {e.text}" for e, sign in found[:SHOWN]]
    return said + ([f"... and {len(found) - SHOWN} more lines"] if len(found) > SHOWN else [])
