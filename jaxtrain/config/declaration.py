"""The declaration of a key: its meaning, its values, and whether a resumed run may change it. `schema` declares all keys."""

import ctypes
import dataclasses
import math
from typing import Any, Literal, NamedTuple, cast

# Magnitudes of numbers that a step computes with, in float32 (1.2e-38 to 3.4e38). Beyond these, quotients and products of two
# of them would become 0 or infinite, and weights NaN.
SMALLEST, LARGEST = 1e-30, 1e30
MOST = 2**31 - 1  # of a whole number: counts, positions and seeds are int32


class Resume(NamedTuple):
    """Whether a key may differ from the checkpoint's when a run resumes, and why.

    word: free: it changes place, speed, length or output of the run, or is often changed on purpose; noted at start. ask: it
    changes the training, and may be an unnoticed edit; checkpoint.allow_change must name it. never: the tensors or the meaning
    of token ids would not fit.
    """

    word: Literal["free", "ask", "never"]
    reason: str


# Reasons that several keys share
UNRELATED = Resume("free", "training does not depend on it")
ROUNDING = Resume("free", "the same step up to rounding")
PLACEMENT = Resume(
    "free",
    "placement: values differ by rounding. With moe.capacity_factor above 0, mesh.* and sharding.rules.* decide which "
    "tokens experts drop: then only if named in checkpoint.allow_change",
)
CONTEXT = Resume(
    "free",
    "the same step up to rounding. With moe.capacity_factor and mesh.seq, parallel.context decides which tokens experts drop: "
    "then only if named in checkpoint.allow_change",
)
MICROBATCHES = Resume(
    "free",
    "the same step up to rounding. moe.balance_loss, moe.z_loss and moe.capacity_factor apply to a microbatch: with them only "
    "if named in checkpoint.allow_change",
)
SKIPPED = Resume("free", "decides only whether a run stops or rolls back after skipped steps")
SOURCES = Resume("free", "each source continues at its position, and a new one begins")
POSITION = Resume("ask", "the data position counts sequences of this length in batches of this size")
SEQUENCES = Resume("ask", "other sequences, or another order: some text repeats, some is never used")
RECIPE = Resume("ask", "part of the recipe")
ROTATION = Resume("ask", "positions have another meaning; use it to stretch the context")
FUNCTION = Resume("ask", "the same weights compute another function")
STORAGE = Resume("ask", "rounding changes; stored tensors are converted")
MOMENTS = Resume("ask", "the stored moments were averaged with the old values")
TRAINED = Resume("never", "other tensors are trained and have moments")


@dataclasses.dataclass(frozen=True)
class Key:
    """The declaration of a key, without its type and default.

    Attributes:
        doc: its meaning, in one line.
        choices: the values that a string takes; () for any.
        importable: whether `package.module:name` is a value too.
        at_least, above, at_most, below: the range of a number; None if it is open.
        resume: whether a resumed run may change it; None: as declared for its section.
    """

    doc: str
    choices: tuple[str, ...] = ()
    importable: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    resume: Resume | None = None

    @property
    def values(self) -> str:
        """Return the choices or the range in words; "" for any value."""
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        span = ", ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        return span or " | ".join([*self.choices, *["package.module:name"] * self.importable])

    def nearest(self, value: float) -> float:
        """Return the nearest number in the range."""
        low = self.at_least if self.at_least is not None else SMALLEST if self.above is not None else -LARGEST
        high = self.at_most if self.at_most is not None else self.below - 1e-7 if self.below is not None else LARGEST
        return min(max(SMALLEST if 0 < abs(value) < SMALLEST else value, low), high)

    def out_of_range(self, value: Any) -> tuple[str, str] | None:
        """Return (broken rule, remedy) of a number that is not finite or outside the range, or None.

        A float must also be in the range as the float32 that a step computes with: 0.99999999 is 1 there, and 1e-46 is 0.
        """
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number", "Set one."
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}", f"Set {self.at_least:g} or more."
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}", "Set a positive number."
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}", f"Set {self.at_most:g} or less."
        if self.below is not None and float32(value) >= self.below:
            rule = f"must be below {self.below:g}" + (", and in float32 it is that" if value < self.below else "")
            return rule, f"Set {self.below - 1e-7:.7f} or less."
        if isinstance(value, int) and self.at_most is None and value > MOST:
            return f"must be at most {MOST}, the largest int32", f"Set {MOST} or less."
        if not isinstance(value, float):
            return None
        if 0 < abs(value) < SMALLEST:
            zero = "" if self.above == 0 else "0, or "
            return "is too small for float32, in which it or its quotients become 0", f"Set {zero}{SMALLEST:g} or more."
        if abs(value) > LARGEST:
            return "is too large for float32, in which it or its products become infinite", f"Set {LARGEST:g} or less."
        return None


def float32(value: float) -> float:
    """Return the number of float32 nearest to a float; infinity above the largest."""
    return ctypes.c_float(value).value


def key[T](
    default: T,
    doc: str,
    choices: tuple[str, ...] = (),
    importable: bool = False,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    resume: Resume | None = None,
) -> T:
    """Return a dataclass field with its declaration as metadata. The arguments are those of `Key`."""
    declaration = Key(doc, choices, importable, at_least, above, at_most, below, resume)
    return cast(T, dataclasses.field(default=default, metadata={"key": declaration}))


def section[T](default: T, resume: Resume | None = None) -> T:
    """Return a dataclass field for a section. resume: of its keys that declare none themselves."""
    return cast(T, dataclasses.field(default=default, metadata={"resume": resume}))
