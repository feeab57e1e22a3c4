"""Data sets of the Hugging Face hub: each is fetched once, into a file of the cache."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from covey.system.cache import cache_folder, write_private_file
from covey_verify.errors import ConfigError, DataError

PREFIX = "hub:"
ADDRESS_PATTERN = re.compile(r"hub:(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?:\?(?P<options>.*))?")
EXAMPLE = "hub:openai/gsm8k?config=main"


class HubData(NamedTuple):
    """A split of a data set on the hub."""

    id: str
    config: str | None
    split: str
    revision: str


def is_hub(path: Path) -> bool:
    """Return whether a path of a config is the address of a data set."""
    return str(path).startswith(PREFIX)


def hub_data(address: str, split: str) -> HubData:
    """Read an address; ``split`` is the default. Raises ConfigError.

    >>> hub_data("hub:openai/gsm8k@e53f048?config=main", "train")
    HubData(id='openai/gsm8k', config='main', split='train', revision='e53f048')
    """
    match = ADDRESS_PATTERN.fullmatch(address)
    options = dict(parse_qsl(match["options"] or "", keep_blank_values=True)) if match else {}
    if match is None or options.keys() - {"config", "split"} or not all(options.values()):
        raise ConfigError(
            f"data: {address!r} is not the address of a data set; write hub:OWNER/NAME, and if needed "
            f"@REVISION, ?config= and &split=, as {EXAMPLE}"
        )
    return HubData(
        match["id"], options.get("config"), options.get("split", split), match["revision"] or "main"
    )


def fetch_rows(address: str, split: str) -> Path:
    """Return the file with a data set's rows, one JSON object a line; fetch them if they are not kept.

    A revision that is no commit is looked up once: later runs get the same rows, without a network. Raises
    ConfigError for an address that cannot be read, DataError for a data set that cannot be fetched.
    """
    data = hub_data(address, split)
    folder = cache_folder() / "data"
    folder.mkdir(exist_ok=True, mode=0o700)
    key = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:8]
    # The name goes into the ids of problems, so it says what is in the file.
    name = data.id.replace("/", "--")
    split_name = data.split.replace("/", "-")
    file = folder / f"{name}-{split_name}-{key}.jsonl"
    if not file.is_file():
        print(f"note: fetching {data.id} ({data.split}, {data.revision}) once, into {file}", file=sys.stderr)
        write_private_file(file, _fetch_lines(address, data))
    return file


def _fetch_lines(address: str, data: HubData) -> bytes:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"data: {address} needs the package datasets: pip install 'covey[hub]'") from None
    try:
        rows = load_dataset(data.id, data.config, split=data.split, revision=data.revision)
        lines = [_row_line(address, number, row) for number, row in enumerate(rows, start=1)]
    except DataError:
        raise
    except Exception as error:  # the hub, the network and each format have exceptions of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"data: {address} could not be fetched: {reason[:300]}. A file of its rows (to_json) works too"
        ) from None
    if not lines:
        raise DataError(f"data: {address}: the split {data.split} has no rows")
    return "".join(f"{line}\n" for line in lines).encode()


def _row_line(address: str, number: int, row: Mapping[str, object]) -> str:
    """Return a row as JSON. Raises DataError for a column that is neither text, number, list nor date."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_as_text)
    except TypeError as error:
        column = next((name for name, value in row.items() if not _is_json(value)), "")
        raise DataError(f"data: {address}: row {number}: the column {column!r} is no text: {error}") from None


def _as_text(value: object) -> str:
    """Return a date or a decimal number as text. Raises TypeError for an image, a sound, or anything else."""
    if isinstance(value, date | time | Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, default=_as_text)
    except TypeError:
        return False
    return True
