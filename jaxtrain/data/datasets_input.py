"""`--input=hf:DATASET[:CONFIG][:SPLIT]`: a data set by name, streamed through the `datasets` package where it is installed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain.data.template import RowError

PREFIX = "hf:"
FORM = "hf:DATASET[:CONFIG][:SPLIT]; the split is train where none is given, hf:DATASET::SPLIT leaves the config open"


class DatasetError(ValueError):
    """A data set that cannot be opened or read; the message names it and says what to do."""


def parse(spec: str) -> tuple[str, str | None, str]:
    """(name or folder, config, split). Raises DatasetError."""
    name, *rest = spec.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise DatasetError(f"--input={spec}: is written {FORM}")
    config, split = [*rest, "", ""][:2]
    return name, config or None, split or "train"


def _open(spec: str) -> Any:
    """The data set, streamed: nothing but what is read is fetched."""
    name, config, split = parse(spec)
    try:
        import datasets
    except ImportError as e:
        raise DatasetError(
            f"--input={spec}: needs the package `datasets`, which is not installed: pip install 'jaxtrain[hf-datasets]'"
        ) from e
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as e:  # no network, no such name, config or split, gated: many classes, one remedy
        raise DatasetError(
            f"--input={spec}: cannot be opened ({_reason(e)}). Check name, config and split (it is written {FORM}), and the "
            "network; or fetch its files with `hf download --repo-type=dataset` elsewhere and give these."
        ) from e


def _reason(e: Exception) -> str:
    return f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"


def parts(spec: str, columns: Callable[[Iterable[str]], list[str]]) -> tuple[int, str]:
    """How many parts (files) it comes in, and a description of its content that changes with it. Raises DatasetError."""
    data = _open(spec)
    _check(spec, data, columns)
    import datasets

    name, config, split = parse(spec)
    builder = datasets.load_dataset_builder(name, config)
    files = getattr(builder.config, "data_files", None) or {}
    origin = getattr(files.get(split), "origin_metadata", "") if hasattr(files, "get") else ""
    return data.num_shards, repr((builder.config.name, getattr(builder, "hash", ""), origin))


def _check(spec: str, data: Any, columns: Callable[[Iterable[str]], list[str]]) -> list[str] | None:
    """The columns to read; None where the data set does not say which it has."""
    if data.column_names is None:
        return None
    try:
        return columns(data.column_names)
    except RowError as e:
        raise DatasetError(f"--input={spec}: {e}") from e


def rows(
    spec: str, begin: int, end: int, columns: Callable[[Iterable[str]], list[str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of the parts begin..end-1, in order. Raises DatasetError."""
    data = _open(spec)
    if (names := _check(spec, data, columns)) is not None:
        data = data.select_columns(names)
    for part in range(begin, end):
        try:
            yield from enumerate(data.shard(data.num_shards, part), 1)
        except Exception as e:
            raise DatasetError(f"--input={spec}: part {part + 1} cannot be read to its end ({_reason(e)})") from e
