"""Data sets of the hub, by hand-written stand-ins for the package that fetches them."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

from covey.config.load import load_config
from covey.tasks.hub import hub_data
from covey.tasks.source import data_files, load_source
from covey_verify.errors import ConfigError, DataError

Asked = list[tuple[object, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """A hub with one data set of two splits, and what it was asked for."""
    asked: Asked = []

    def load_dataset(name: str, config: str | None, *, split: str, revision: str) -> list[dict[str, object]]:
        asked.append((name, config, split, revision))
        if name != "some/sums":
            raise ConnectionError("Couldn't reach 'some/other' on the Hub\nat length")
        return [
            {"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range({"train": 3, "test": 2}[split])
        ]

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def config_of(tmp_path: Path, data: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: tiny\noutput: {tmp_path / 'out'}\nrewards: [exact]\ndata: {data}\n")
    return path


def test_both_splits_are_read_by_default_and_fetched_once(tmp_path: Path, asked: Asked) -> None:
    data = "{train: 'hub:some/sums?config=main', test: 'hub:some/sums?config=main', prompt: question}"
    resolved = load_config(config_of(tmp_path, data))
    for _ in range(2):
        source = load_source(resolved)
        assert [p.prompt for p in source.train] == ["0 + 0?", "1 + 1?", "2 + 2?"]
        assert [p.columns["answer"] for p in source.test] == ["0", "2"]
    assert sorted(asked) == [("some/sums", "main", "test", "main"), ("some/sums", "main", "train", "main")]
    names = [path.name for path in data_files(resolved)]
    assert [name.rpartition("-")[0] for name in names] == ["some--sums-train", "some--sums-test"]
    assert source.train[0].id == f"{names[0]}:1"


def test_another_revision_is_another_file(tmp_path: Path, asked: Asked) -> None:
    for address in ("hub:some/sums@e53f048?split=test", "hub:some/sums@abcdef0?split=test"):
        load_source(load_config(config_of(tmp_path, f"{{train: '{address}', prompt: question}}")))
    assert [(split, revision) for *_, split, revision in asked] == [("test", "e53f048"), ("test", "abcdef0")]


def test_a_data_set_that_cannot_be_fetched_leaves_no_file(tmp_path: Path, asked: Asked) -> None:
    resolved = load_config(config_of(tmp_path, "{train: 'hub:some/other'}"))
    with pytest.raises(
        DataError, match=r"^data: hub:some/other could not be fetched: Couldn't reach .* on the Hub\."
    ):
        load_source(resolved)
    assert list((tmp_path / "cache" / "covey" / "data").iterdir()) == []


def test_an_image_is_refused_and_a_date_is_text(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, object]] = [{"question": "when?", "day": date(2023, 5, 21)}]
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: rows)
    resolved = load_config(config_of(tmp_path, "{train: 'hub:some/sums', prompt: question}"))
    assert load_source(resolved).train[0].columns["day"] == "2023-05-21"
    rows.append({"question": "what?", "day": b"PNG"})
    resolved = load_config(config_of(tmp_path, "{train: 'hub:some/pictures', prompt: question}"))
    with pytest.raises(DataError, match="row 2: the column 'day' is no text: a bytes cannot be written"):
        load_source(resolved)


def test_the_missing_package_is_named(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'covey\[hub\]'"):
        load_source(load_config(config_of(tmp_path, "{train: 'hub:some/sums'}")))


@pytest.mark.parametrize(
    "address", ["hub:gsm8k", "hub:a/b/c", "hub:a/b?name=main", "hub:a/b?split=", "hub:a/b@"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write hub:OWNER/NAME"):
        hub_data(address, "train")
