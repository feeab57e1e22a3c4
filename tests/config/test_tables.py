"""Tables from Python: of other libraries' classes, as rows of plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from covey.config.python_objects import with_objects
from covey.trl.rows import list_rows
from covey_verify.errors import ConfigError

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)]


class Indexed:
    """As `torch.utils.data.Dataset`: an index and a length, but no iterator."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, n: int) -> dict[str, Any]:
        return ROWS[n]


class Columns:
    """As `pyarrow.Table`: columns by index, no iterator of rows."""

    columns = ("prompt", "answer")

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, n: int) -> list[Any]:
        return [row[self.columns[n]] for row in ROWS]

    def to_pylist(self) -> list[dict[str, Any]]:
        return ROWS


class Formatted:
    """As `datasets.Dataset`: `with_format` decides what a row's values are."""

    column_names = ("prompt", "answer")

    def __init__(self, kind: str | None) -> None:
        self.format = {"type": kind, "columns": ["prompt", "answer"], "output_all_columns": False}

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        kind = self.format["type"]
        yield from ([{name: [kind, v] for name, v in row.items()} for row in ROWS] if kind else ROWS)

    def with_format(self, kind: str | None, **kept: object) -> Formatted:
        assert kept == {"columns": ["prompt", "answer"], "output_all_columns": False}
        return Formatted(kind)


class FormattedStream:
    """As `datasets.IterableDataset`: it has a format but does not name it."""

    def __init__(self, kind: str | None = "torch") -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"prompt": self.kind}] if self.kind else ROWS)

    def with_format(self, kind: str | None) -> FormattedStream:
        return FormattedStream(kind)


@pytest.mark.parametrize("table", [Indexed(), Columns(), Formatted("torch"), FormattedStream()])
def test_tables_of_other_libraries_are_rows_of_plain_values(table: object) -> None:
    for data in (table, {"train": table}):
        read: Any = with_objects({"data": data})["data"]
        rows = read["train"]
        assert rows.stream is None or not rows.read(len(ROWS))
        assert rows.rows == ROWS
    assert list_rows(table, "train_dataset") == ROWS


def test_a_transform_of_a_data_set_makes_its_rows() -> None:
    read: Any = with_objects({"data": Formatted("custom")})["data"]
    assert read["train"].rows[0] == {"prompt": ["custom", "0+1="], "answer": ["custom", 1]}


@pytest.mark.parametrize("table", [Formatted(None), Columns(), ROWS])
def test_a_table_under_a_name_that_no_run_reads_is_refused(table: object) -> None:
    with pytest.raises(
        ConfigError, match=r"data.validation: a run reads the tables train and test"
    ) as refused:
        with_objects({"data": {"train": ROWS, "validation": table}})
    assert '"test": tables["validation"]' in str(refused.value)
