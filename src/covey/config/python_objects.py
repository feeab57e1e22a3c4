"""Objects given from Python in place of names in a file: a model with its tokenizer, rows, functions.

The record of a run has a text for each object; to resume the run, the object has to be given again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from covey.config.usercode import spec_of
from covey_verify.errors import ConfigError
from covey_verify.usercode import name_of

OBJECT = "an object in Python: "
"""Prefix in a recorded config of the name of an object that no file can hold."""


PART_OF_STREAM = "an iterator of rows"
"""Name of rows whose iterator has more of them than the run takes."""


class PythonObject:
    """An object given from Python; its text is its entry in a record."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return OBJECT + self.name

    __repr__ = __str__


class ModelObject(PythonObject):
    """A transformers model, or peft's wrapper of one, with its tokenizer; it is trained in place.

    ``reference`` is the frozen model that preferences are compared with; None: the model as the run begins.
    """

    def __init__(self, model: object, tokenizer: object, reference: Any = None) -> None:
        model = without_compilation(model)
        super().__init__(name_of(model))
        self.model = model
        self.tokenizer = tokenizer
        self.reference = reference
        self.source = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        """The folder or hub id that it was loaded from, or ""."""


def without_compilation(model: Any) -> Any:
    """Return a model without the wrapper of `torch.compile`, which shares its weights.

    The wrapper would compile the modules' passes, which covey does not use where it has its own.
    """
    return getattr(model, "_orig_mod", model)


MAX_STREAMED = 1_000_000
"""Largest number of rows that are read from an iterator, since they are kept in memory."""


class RowsObject(PythonObject):
    """Rows of data. An iterator is read as far as a run needs it, and its rows are kept."""

    def __init__(self, key: str, rows: Iterable[object]) -> None:
        self.key = key
        table = listed(key, rows)
        self.stream = None if table is not None else iter(without_format(rows))
        """The iterator, if it is one."""
        self.rows: Sequence[object] = [] if table is None else table
        """The rows; those of an iterator once ``read`` was called."""
        self._read = list[object]()
        super().__init__("" if table is None else f"{len(table)} rows")

    def read(self, count: int) -> bool:
        """Make ``rows`` the first ``count`` of the iterator; return whether it has more.

        Raises ConfigError for more rows than are kept.
        """
        assert self.stream is not None, "a table has all its rows"
        kept = min(count, MAX_STREAMED)
        # One row more shows whether the iterator ends here. If it does, it is the same as a list of its rows.
        self._read += islice(self.stream, max(0, kept + 1 - len(self._read)))
        has_more = len(self._read) > kept
        if has_more and count > kept:
            raise ConfigError(
                f"{self.key}: the run takes more than {MAX_STREAMED:,} rows of the iterator, which it would "
                "keep in memory. Lower train.steps, or give fewer rows, as itertools.islice(rows, 10_000)"
            )
        self.rows = self._read[:kept]
        self.name = PART_OF_STREAM if has_more else f"{len(self.rows)} rows"
        return has_more


def listed(key: str, rows: Any) -> Sequence[Any] | None:
    """Return rows, columns, or a table of pandas, polars or pyarrow, as a sequence of rows.

    Returns None for an iterator, which may be endless. Raises ConfigError for columns that form no rows.
    """
    if isinstance(rows, Sequence):
        return rows
    if isinstance(rows, Mapping):
        return _joined_columns(key, rows)
    if hasattr(rows, "columns") and hasattr(rows, "to_dicts"):  # polars
        return list(rows.to_dicts())
    if hasattr(rows, "columns") and hasattr(rows, "to_pylist"):  # pyarrow
        return list(rows.to_pylist())
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):  # pandas
        repeated = [name for name, count in Counter(rows.columns).items() if count > 1]
        if repeated:
            raise ConfigError(
                f"{key}: several columns are named {repeated[0]!r}; rename or remove all but one"
            )
        return [{name: _cell(value) for name, value in row.items()} for row in rows.to_dict(orient="records")]
    if not hasattr(rows, "__len__"):
        return None
    if isinstance(rows, Iterable):
        return list(without_format(rows))
    return [rows[n] for n in range(len(rows))]  # torch's data sets with an index


def without_format(rows: Any) -> Any:
    """Return a data set of `datasets` that gives plain values, not the tensors or frames of its format.

    A transform of the user's is kept: it makes the rows.
    """
    shown = getattr(rows, "format", None)
    if isinstance(shown, Mapping):
        kept = {name: shown[name] for name in ("columns", "output_all_columns")}
        return rows if shown["type"] in (None, "custom") else rows.with_format(None, **kept)
    return rows.with_format(None) if hasattr(rows, "with_format") else rows


def _joined_columns(key: str, columns: Mapping[str, Any]) -> list[object]:
    """Return the rows of columns given by name."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"{key}: the columns have different numbers of values: {counts}")
    # ``tolist`` gives Python's own numbers, of arrays and of pandas' columns.
    parts = [column.tolist() if hasattr(column, "tolist") else column for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*parts, strict=True)]


def _cell(value: object) -> object:
    """Return a value of a pandas table as JSON has it: lists for arrays, None for a missing value."""
    if isinstance(value, np.ndarray):  # pandas reads the lists of parquet as arrays
        return [_cell(item) for item in value]
    if isinstance(value, dict):
        return {key: _cell(item) for key, item in value.items()}
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def or_object(kind: object) -> GetPydanticSchema:
    """Return an annotation that lets a field of type ``kind`` also hold a PythonObject."""

    def pass_given(value: object, check: core_schema.ValidatorFunctionWrapHandler) -> object:
        return value if isinstance(value, PythonObject) else check(value)

    return GetPydanticSchema(
        # An object passes unchecked, and anything else is validated as ``kind``.
        lambda _, schema: core_schema.no_info_wrap_validator_function(
            pass_given, schema(kind), serialization=core_schema.to_string_ser_schema()
        )
    )


def with_objects(settings: Mapping[str, object]) -> dict[str, object]:
    """Return Python's settings with models (and tokenizers) and data as Python objects.

    The settings of `stages` are converted too. Raises ConfigError for a model without a tokenizer or the
    reverse.
    """
    settings = dict(settings)
    model = settings.get("model")
    tokenizer = settings.pop("tokenizer", None)
    # A value of another plain type (a number, a list) is a mistake, which the schema reports.
    is_object = not (model is None or isinstance(model, str | Path | bool | int | float | list | Mapping))
    if is_object and tokenizer is None and not isinstance(model, PythonObject):
        raise ConfigError(
            f"model: {name_of(model)} needs its tokenizer: covey.train(model=..., tokenizer=...)"
        )
    if tokenizer is not None and not is_object:
        raise ConfigError(
            "tokenizer: only a model given as an object needs one; a folder or hub id has its own"
        )
    if is_object and not isinstance(model, PythonObject):
        settings["model"] = ModelObject(model, tokenizer)
    elif isinstance(model, Path):
        settings["model"] = str(model)
    if "data" in settings:
        settings["data"] = _data(settings["data"])
    stages = settings.get("stages")
    if isinstance(stages, list | tuple):
        settings["stages"] = [with_objects(s) if isinstance(s, Mapping) else s for s in stages]
    return settings


def _data(data: object) -> object:
    # Columns that are named as splits are splits.
    if _are_rows(data) and not (isinstance(data, Mapping) and {"train", "test"} & set(data)):
        return {"train": RowsObject("data.train", data)}
    if not isinstance(data, Mapping):
        return data
    for key in ("train", "test"):
        value = data.get(key)
        if isinstance(value, Mapping) and not _are_rows(value):
            names = ", ".join(repr(name) for name in value) or "nothing"
            raise ConfigError(
                f"data.{key}: this dict ({names}) holds neither rows nor columns: give a list of dicts, or a "
                "dict of lists. If it holds tables, give one of them, or, if they are named train and test, "
                "the dict as data"
            )
    unread = [str(key) for key, value in data.items() if key not in ("train", "test") and _is_table(value)]
    if unread:
        raise ConfigError(
            f"data.{unread[0]}: a run reads the tables train and test, and not this one. Give "
            f'data={{"train": tables["train"], "test": tables["{unread[0]}"]}}'
        )
    return {
        key: RowsObject(f"data.{key}", value) if key in ("train", "test") and _are_rows(value) else value
        for key, value in data.items()
    }


def _are_rows(value: object) -> TypeGuard[Iterable[object]]:
    """Whether a value is rows, or a mapping of columns that are not all tables themselves."""
    if not isinstance(value, Mapping):
        indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        has_rows = isinstance(value, Iterable) or indexed
        return has_rows and not isinstance(value, str | bytes | PythonObject)
    columns = [column for column in value.values() if _is_column(column)]
    tables = [column for column in columns if isinstance(next(iter(column), None), Mapping)]
    return bool(value) and len(columns) == len(value) and len(tables) < len(value)


def _is_table(value: object) -> bool:
    """Whether a value is a table by its class, or a list of dicts."""
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) or hasattr(value, "column_names") or hasattr(value, "columns")


def _is_column(value: object) -> TypeGuard[Collection[object]]:
    is_table = isinstance(value, Mapping) or hasattr(value, "columns")
    return isinstance(value, Collection) and not isinstance(value, str | bytes | set) and not is_table


def plain(value: object, folder: Path) -> object:
    """Return a value from Python in a form that a file can hold; functions by their name from ``folder``.

    Anything else becomes a text that ``refuse_lost`` refuses by name.
    """
    if isinstance(value, Mapping):
        return {plain(k, folder): plain(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, folder) for v in value]
    if isinstance(value, Path | PythonObject):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    return recorded_name(value, folder)


def recorded_name(function: object, folder: Path) -> str:
    """Return a function's name in a record: where it is found, or an object that has to be given again."""
    return spec_of(function, folder) or f"{OBJECT}{name_of(function)}"


PYTHON_FORMS: Mapping[str, str] = {
    "model": "model=..., tokenizer=...",
    "data": 'data={"train": [...], "test": [...]}',
    "algorithm": "algorithm={...}",
    "stages": "stages=[...]",
}
"""Setting -> how it is given from Python; any other is a list of functions."""


def refuse_lost(raw: Mapping[str, object]) -> None:
    """Raise ConfigError if a recorded config names something that only Python had."""
    lost = dict[str, str]()
    for key, value in raw.items():
        names = [text.removeprefix(OBJECT) for text in strings_in(value) if text.startswith(OBJECT)]
        if names:
            lost[key] = names[0]
    if not lost:
        return
    run = str(raw.get("output", ""))
    arguments = ", ".join(PYTHON_FORMS.get(key, f"{key}=[...]") for key in lost)
    lines = [
        f"{key}: `{name}` was a Python object, which the run's record cannot hold"
        for key, name in lost.items()
    ]
    call = f"({run!r}, {arguments})"
    remedy = f"Give it again from Python: covey.resume{call} or covey.evaluate{call}"
    if lost.keys() - {"model", "data"}:
        remedy += ". A function in a .py file need not be given again"
    raise ConfigError("\n".join([*lines, remedy]))


def strings_in(value: object) -> Iterator[str]:
    """Yield all strings of a value, those in its lists and mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from strings_in(item)
