"""The settings that a wrong key may mean: those for a name of another trainer, and keys that look alike. Imports no jax."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Names whose values are in another unit than ours: a fraction of the steps, tokens, the batch of one device, a learning rate.
OTHER_UNIT = re.compile("ratio|frac|factor|samples|token|device|micro|local|depth|total_batch|decoupled|embedding.lr")
MOST = 3  # candidates in one answer


@functools.cache
def other_trainers() -> dict[str, Any]:
    """Return the content of other_trainers.toml, whose comments describe it."""
    import tomllib  # takes 25 ms, and only a wrong key needs it

    return tomllib.loads(Path(__file__).with_name("other_trainers.toml").read_text(encoding="utf-8"))


def synonym_pairs(row: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of another trainer, settings of jaxtrain) for each name of a row: [names there, settings here, note].

    A name is as the row has it, without its value; if it has one, the settings are without theirs. Only names that begin
    with a small letter or a dash are yielded.
    """
    names = re.findall(r"`(-*[a-z][\w.-]*)([ =`])", re.sub(r" \(.*?\)", "", row[0]))
    groups = [re.findall("`([^`]+)`", group) for group in row[1].split(", ")]
    groups = groups if len(names) % len(groups) == 0 else [sum(groups, [])]
    for i, (name, end) in enumerate(names):
        settings = groups[i % len(groups)]
        yield name, settings if end == "`" else [re.sub(r"^([\w.]+)=.*", r"\1", setting) for setting in settings]


@functools.cache
def synonym_index() -> dict[str, list[str]]:
    """Return name of another trainer, with underscores -> jaxtrain's settings for it, each key once."""
    short = ((name, [setting]) for setting, names in other_trainers()["short"].items() for name in names.split())
    tables = (row for table in other_trainers()["tables"].values() for topic in table.values() for row in topic)
    by_name: dict[str, dict[str, str]] = {}
    for name, settings in (*short, *(pair for row in tables for pair in synonym_pairs(row))):
        meant = by_name.setdefault(_plain(name), {})
        for setting in settings:
            key, setting = _key(setting), setting.replace("./run.sh ", "python -m jaxtrain ")
            meant[key] = setting if meant.get(key, setting) == setting else key  # two values: the user's own
    return {name: list(meant.values()) for name, meant in by_name.items()}


def nearest_keys(key: str, known_keys: Sequence[str]) -> list[str]:
    """Return up to three settings that a wrong key may mean, the likeliest first; [] if no key is near.

    Keys of the typed section that differ by about one letter are the only results. Otherwise settings of the typed section
    come first: those for a name of another trainer, then keys that share its words. If none is for a name of another
    trainer, its settings in other sections follow. If the typed section has no setting, keys of the same name follow. If
    there is no result, spelling decides.

    Args:
        key: the dotted key, as it was typed.
        known_keys: all dotted keys of the config.
    """
    key = _plain(key)
    section, _, last = key.rpartition(".")
    section = _nearest_section(section, known_keys)
    tails = {name: name.rpartition(".")[2] for name in known_keys}
    inside = {tail: name for name, tail in tails.items() if section and name.rpartition(".")[0] == section}
    if slips := difflib.get_close_matches(last, inside, MOST, 0.85):
        return [inside[tail] for tail in slips]
    meant = [*_foreign_settings(key, known_keys), *_foreign_settings(last, known_keys)]
    here = [setting for setting in meant if _key(setting) in inside.values()]
    similar = [inside[tail] for tail in sorted(inside, key=lambda tail: abs(len(tail) - len(last))) if _is_similar(last, tail)]
    same = [name for name in known_keys if tails[name] == last and not name.startswith("sharding.rules.")]
    candidates = [*here, *similar, *(() if here else meant), *(() if here or similar else same)]
    if not candidates:
        candidates = [inside[tail] for tail in difflib.get_close_matches(last, inside, MOST)]
        for near in difflib.get_close_matches(last, [*tails.values(), *synonym_index()], MOST, 0.75):
            candidates += [*(name for name in known_keys if tails[name] == near), *_foreign_settings(near, known_keys)]
    return [setting for i, setting in enumerate(candidates) if _key(setting) not in map(_key, candidates[:i])][:MOST]


def did_you_mean(settings: Iterable[str]) -> str:
    """Return the question for some settings: "Did you mean A, B or C?"."""
    *first, last = settings
    return f"Did you mean {', '.join(first)} or {last}?" if first else f"Did you mean {last}?"


def nearest_key(key: str, known_keys: Sequence[str]) -> str:
    """Return the remedy for a wrong key: the nearest keys; if none, all keys of its section, or else the option --explain."""
    if settings := nearest_keys(key, known_keys):
        return did_you_mean(settings)
    section = key.rpartition(".")[0]
    siblings = [name for name in known_keys if section and name.rpartition(".")[0] == section]
    return f"Known: {', '.join(siblings)}." if siblings else "--explain lists all keys."


def _foreign_settings(name: str, keys: Sequence[str]) -> list[str]:
    """Return the settings for a name of another trainer: those among `keys`, options and commands."""
    return [
        setting for setting in synonym_index().get(name, ()) if setting.startswith(("-", "python")) or _key(setting) in keys
    ]


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()


def _key(setting: str) -> str:
    return setting.partition("=")[0]


def _nearest_section(section: str, known_keys: Sequence[str]) -> str:
    sections = {name.rpartition(".")[0] for name in known_keys}
    if section in sections:
        return section
    aliases = {name: ours for ours, names in other_trainers()["sections"].items() for name in names.split()}
    near = difflib.get_close_matches(section, sections, 1, 0.75)
    return aliases.get(section.partition(".")[0]) or next(iter(near), section)


def _is_similar(typed: str, tail: str) -> bool:
    """Return whether one name has all words of the other, or begins with it."""
    a, b = set(typed.split("_")), set(tail.split("_"))
    begins = min(len(typed), len(tail)) >= 3 and (typed.startswith(tail) or tail.startswith(typed))
    return a <= b or b <= a or begins
