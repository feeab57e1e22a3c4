"""The reader of problems from a user's files: JSONL, a JSON list, CSV or parquet, one problem per row."""

from __future__ import annotations

import csv
import json
import math
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from covey.config.python_objects import RowsObject
from covey.config.schema import Data
from covey.system.opening import is_deep
from covey.tasks.examples import PLACE, messages_of, refuse_messages_in_text, with_prompt
from covey.tasks.sampled import SAMPLED, read_sampled, without_nulls
from covey.tasks.schemas import recognize_schema
from covey.types import Problem
from covey_verify.errors import DataError
from covey_verify.parsing import parse_json
from covey_verify.types import Messages

NumberedRows: TypeAlias = Iterator[tuple[int, dict[str, Any]]]
"""(line or row number from 1, row) of each row."""
MAX_PROMPT = 4 << 20
"""Largest prompt in bytes. Tokenizing more takes minutes, and is more than any model reads."""
GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip has compressed."""
LINE_END = re.compile(r"\r\n|\r|\n")
QUOTED = re.compile(r'"[^"]*"')
"""A quoted field of CSV, which may contain the delimiter."""
RESERVED_NAMES = {
    "prompts", "completions", "completion_ids", "sampled_ids", "trainer_state", "log_extra", "log_metric",
}  # fmt: skip
"""Names of arguments of reward functions, which no column may have."""
DATASETS_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files of which every folder saved by `datasets` has one."""
TEMPLATE_COLUMNS = ("tools", "documents")
"""Columns that are arguments of the chat template, each a list of objects."""


def read_problems(file: Path, data: Data, answered: bool = False) -> list[Problem]:
    """Return the file's rows as problems, with ids `name:line`.

    ``answered``: the model answers the rows instead of imitating their answers. Raises DataError naming the
    file, the line and the column.
    """
    problems = [
        _problem(f"{file}:{line}", f"{file.name}:{line}", row, data, answered) for line, row in rows(file)
    ]
    if not problems:
        raise DataError(f"{file}: the file has no rows; write one JSON object per line")
    return problems


def given_problems(table: RowsObject, data: Data, answered: bool = False) -> list[Problem]:
    """Return rows given from Python as problems, with ids `train:1`, ..., checked like a file."""
    problems = []
    for number, row in enumerate(table.rows, start=1):
        where = f"{table.key}: row {number}"
        identifier = f"{table.key.removeprefix('data.')}:{number}"
        problems.append(_problem(where, identifier, _row(row, where), data, answered))
    if not problems:
        raise DataError(f"{table.key}: there are no rows; give dicts, each with a prompt")
    return problems


def rows(file: Path) -> NumberedRows:
    """Yield (line or row number from 1, row) of a .jsonl, .json, .csv or .parquet file."""
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if not file.is_file():
        raise DataError(missing_file_message(file))
    with file.open("rb") as content:
        start = content.read(2)
    if start == GZIP:
        raise DataError(f"{file}: the file is compressed; unpack it with gunzip")
    if file.suffix not in readers:
        raise DataError(f"{file}: this kind of file is unknown; use {', '.join(readers)}")
    if start in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise DataError(f"{file}: the file is UTF-16, as PowerShell's > writes it; save it as UTF-8")
    yield from readers[file.suffix](file)


def missing_file_message(file: Path, of_config: bool = False) -> str:
    """Return the message for a path that is no file. ``of_config``: a config names it, so in two folders."""
    if any((file.parent / name).is_file() for name in DATASETS_FILES):
        return (
            f"{file.parent}: this is a folder of `datasets`; write a file with its to_json('train.jsonl'), "
            "or give the dataset from Python"
        )
    places = " next to the config or in the working directory" if of_config and not file.is_absolute() else ""
    return f"{file}: {'this is not a file' if file.exists() else f'no such file{places}'}"


def _jsonl(file: Path) -> NumberedRows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield number, _row(_parse_json(line, f"{file}:{number}"), f"{file}:{number}")


def _json(file: Path) -> NumberedRows:
    """Read a list of objects, or one object per line."""
    content = file.read_bytes().removeprefix(BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _jsonl(file)
        return
    for number, row in enumerate(_parse_json(content, str(file)), start=1):
        yield number, _row(row, f"{file}: row {number}")


def _parse_json(text: str | bytes, where: str) -> Any:
    if is_deep(text if isinstance(text, bytes) else text.encode("utf-8", "replace")):
        raise DataError(f"{where}: nested too deeply")
    try:
        return parse_json(text, where)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {_not_utf8(error)}") from None


def _row(row: object, where: str) -> dict[str, object]:
    if not isinstance(row, Mapping):
        hint = "; a file that holds one list must be named .json" if isinstance(row, list) else ""
        raise DataError(f"{where}: a row must be a JSON object, not a {type(row).__name__}{hint}")
    unnamed = next((name for name in row if not isinstance(name, str)), None)
    if unnamed is not None:  # as in a table of pandas without names of columns
        raise DataError(f"{where}: the column {unnamed!r} has a name that is not text; rename it")
    check_characters(dict(row), where)
    return dict(row)


def check_characters(value: object, where: str) -> None:
    """Raise DataError if a text in a value cannot be encoded, by a tokenizer or in the record of a run."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text contains half of a surrogate pair "
            f"(\\u{ord(error.object[error.start]):04x}), which is not a character; repair it"
        ) from None


csv.field_size_limit((1 << 31) - 1)  # as long as a line of JSON may be


def _csv(file: Path) -> NumberedRows:
    # Every value stays the text it is: a reference answer of 007 must not become 7.
    with file.open(encoding="utf-8-sig", newline="") as lines:
        row_begins = 1
        try:
            delimiter = _delimiter(lines.readline())
            lines.seek(0)
            reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
            _unique(file, reader.fieldnames or ())
            row_begins = reader.line_num + 1
            for row in reader:
                # A quoted field may span several lines, and `line_num` is the last one.
                breaks = sum(len(LINE_END.findall(v)) for v in row.values() if isinstance(v, str))
                row_begins = reader.line_num - breaks
                if None in row or None in row.values():
                    raise DataError(f"{file}:{row_begins}: the row has more or fewer fields than the header")
                yield row_begins, row
                row_begins = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: {_not_utf8(error)}") from None
        except csv.Error as error:
            raise DataError(f"{file}:{row_begins}: not valid CSV: {error}") from None


def _delimiter(header: str) -> str:
    """Return the delimiter: a comma, or the semicolon or tab of a header without commas.

    Spreadsheets write semicolons in countries where numbers have a decimal comma.
    """
    names = QUOTED.sub("", header)
    return next((mark for mark in ",;\t" if mark in names), ",")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return (
        f"the file is not UTF-8: byte {error.object[error.start]:#04x} cannot be read. Save it as UTF-8, for "
        "example by iconv -f WINDOWS-1252 -t UTF-8"
    )


def _parquet(file: Path) -> NumberedRows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{file}: reading parquet needs pyarrow: pip install 'covey[parquet]'") from None
    try:
        table = parquet.read_table(file)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}: not valid parquet: {error}") from None
    _unique(file, table.column_names)
    try:
        content = table.to_pylist()
    except ValueError as error:
        raise DataError(f"{file}: not valid parquet: {error}") from None
    yield from enumerate(content, start=1)


def _unique(file: Path, columns: Sequence[str]) -> None:
    for name, count in Counter(columns).items():
        if count > 1:
            raise DataError(f"{file}: {count} columns have the name {name!r}; rename all but one")


def _problem(
    where: str, identifier: str, row: dict[str, object], data: Data, answered: bool = False
) -> Problem:
    row = {name: None if _is_nan(value) else value for name, value in row.items()}
    if SAMPLED in row:
        return _sampled_problem(where, identifier, row)
    row = with_prompt(with_our_columns(row, data), where, data, answered)
    if data.prompt not in row:
        raise DataError(
            f"{where}: there is no column {data.prompt!r}; the row has {', '.join(map(repr, row))}. Set "
            "data.prompt to the column with the prompt"
        )
    columns = _with_copies(where, {k: v for k, v in row.items() if k != data.prompt}, row, data)
    clash = RESERVED_NAMES & set(columns)
    if clash:
        raise DataError(
            f"{where}: rewards use the name {min(clash)!r} for their own arguments; rename the column"
        )
    prompt = _prompt(where, row, data)
    size = len(str(prompt).encode())
    if size > MAX_PROMPT:
        raise DataError(
            f"{where}: the prompt has {size:,} bytes, more than the allowed {MAX_PROMPT:,}; shorten it"
        )
    template = {} if isinstance(prompt, str) else _template_arguments(where, columns, data)
    return Problem(identifier, prompt, columns, template, isinstance(row[data.prompt], str))


def _is_nan(value: object) -> bool:
    """Return whether a value is NaN: a missing value of rows that were a table of pandas, in JSON too."""
    return isinstance(value, float) and math.isnan(value)


def _sampled_problem(where: str, identifier: str, row: dict[str, object]) -> Problem:
    """Return the problem of a row that a stage has sampled; `data` is not applied to its prompt."""
    sampled = read_sampled(where, row)
    columns = {k: v for k, v in row.items() if k not in ("prompt", SAMPLED)}
    prompt = _prompt(where, {"prompt": None, **row}, Data())
    template = {} if isinstance(prompt, str) else _template_arguments(where, columns, Data())
    return Problem(identifier, prompt, columns, template, sampled_tokens=sampled)


def with_our_columns(row: dict[str, object], data: Data) -> dict[str, object]:
    """Return a row with further columns: those that a path in the config names, or a schema adds."""
    by_path = {name: value_at(row, name) for name in (data.prompt, data.completion) if "." in name}
    row = {**row, **{name: value for name, value in by_path.items() if value is not MISSING}}
    schema = recognize_schema(row, data.prompt)
    if schema is None:
        return row
    added = schema.adds(row)
    names = {"prompt": data.prompt, "completion": data.completion}
    return {**row, **{names.get(name, name): value for name, value in added.items()}}


MISSING = object()
"""Returned for a column that a row does not have; None may be a value."""


def value_at(row: Mapping[str, object], name: str) -> object:
    """Return a column's value, or the value at a path into its objects; ``MISSING`` if there is none.

    >>> value_at({"reward_model": {"ground_truth": "2"}}, "reward_model.ground_truth")
    '2'
    """
    if name in row:
        return row[name]
    head, _, rest = name.partition(".")
    inner = row.get(head)
    return value_at(inner, rest) if rest and isinstance(inner, Mapping) else MISSING


def _with_copies(
    where: str, columns: dict[str, object], row: Mapping[str, object], data: Data
) -> dict[str, object]:
    """Return a row's columns with the copies for ``data.answer`` and ``data.columns``. Raises DataError."""
    copies = [(name, source, f"data.columns.{name}") for name, source in data.columns.items()]
    if data.answer is not None:
        copies.append(("answer", data.answer, "data.answer"))
    for name, source, setting in copies:
        value = value_at(row, source)
        if value is MISSING:
            raise DataError(
                f"{where}: there is no column {source!r} ({setting}); the row has {', '.join(map(repr, row))}"
            )
        columns = {**columns, name: value}
    return columns


def prompt_of(where: str, row: Mapping[str, object], data: Data) -> tuple[str | Messages, dict[str, object]]:
    """Return a row's prompt as the model gets it, and the chat template's arguments. Raises DataError."""
    # The settings of `data` do not apply to a row that a stage has sampled.
    layout = Data() if SAMPLED in row else data
    prompt = _prompt(where, row, layout)
    return prompt, {} if isinstance(prompt, str) else _template_arguments(where, row, layout)


def _prompt(where: str, row: Mapping[str, object], data: Data) -> str | Messages:
    prompt = row[data.prompt]
    if isinstance(prompt, str) and prompt.strip():
        if SAMPLED not in row:
            refuse_messages_in_text(where, data.prompt, prompt)
        if data.template is not None:
            prompt = _fill_template(where, data.template, {**row, "prompt": prompt}, data)
        if not data.chat and data.system is None:
            return prompt
        return [*_system(data), {"role": "user", "content": prompt}]
    messages = messages_of(prompt) if isinstance(prompt, list) else None
    if messages:
        return [*([] if has_system(messages) else _system(data)), *messages]
    raise DataError(
        f"{where}: {data.prompt!r} must be text or a list of {{role, content}} messages, each content text "
        f"or parts of text, not {str(prompt)[:120]!r}"
    )


def has_system(messages: Messages) -> bool:
    """Return whether a conversation begins with a system message of its own."""
    return messages[0]["role"] in ("system", "developer")


def _fill_template(where: str, template: str, row: Mapping[str, object], data: Data) -> str:
    """Return ``data.template`` filled with columns. Raises DataError for a missing one or the answer's."""
    for name in PLACE.findall(template):
        if name not in row or row[name] is None:
            raise DataError(
                f"{where}: data.template names column {name!r}, which the row does not have. To write "
                f"literal braces, write {{ {name} }}"
            )
        if name in ("answer", data.answer, data.completion):
            raise DataError(
                f"{where}: data.template would show the model column {name!r}, which holds the correct "
                f"answer. To write literal braces, write {{ {name} }}"
            )
    return PLACE.sub(lambda match: str(row[match[1]]), template)


def _template_arguments(where: str, columns: Mapping[str, object], data: Data) -> dict[str, object]:
    """Return the chat template's arguments besides the messages; a row's values win over the config's."""
    of_row = _parsed_column(where, columns, "chat_template_kwargs") or {}
    if not isinstance(of_row, dict):
        raise DataError(f"{where}: chat_template_kwargs must be an object, not {str(of_row)[:60]!r}")
    arguments = {**data.chat_template_kwargs, **of_row}
    for name in TEMPLATE_COLUMNS:
        # An empty list is left out, because some templates treat it differently from no list.
        value = _parsed_column(where, columns, name)
        if value:
            arguments[name] = value
        value = arguments.get(name, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise DataError(
                f"{where}: {name!r} goes to the chat template and must be a list of objects (for tools: JSON "
                f"schemas), not {str(value)[:60]!r}. If the column is something else, rename it"
            )
    return arguments


def _parsed_column(where: str, columns: Mapping[str, object], name: str) -> object:
    """Return a column's value, parsed if it is JSON in a text (CSV), without the nulls that parquet adds."""
    value = columns.get(name)
    if isinstance(value, str) and value.strip():
        value = _parse_json(value, f"{where}: {name}")
    return without_nulls(value)


def _system(data: Data) -> list[dict[str, str]]:
    return [{"role": "system", "content": data.system}] if data.system else []
