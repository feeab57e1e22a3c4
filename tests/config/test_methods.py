"""A method is a row of one table; whatever else a new one needs is named here, method by method."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.proof.given_settings import SETTINGS

from covey.config.algorithm import rows_of
from covey.config.load import load_config
from covey.config.methods import EXAMPLE_SAMPLERS, METHODS, ExampleKind, Method
from covey.objective.preference import PREFERENCES
from covey.proof.losses import AnswerLogprob, judged_loss, pair_loss
from covey.tasks.examples import COLUMNS_OF
from covey.training.example_sampling import SELECTIONS
from covey.training.pipeline import LOOPS
from covey_verify.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
STAGES = (DOCS / "stages.md").read_text("utf-8")
OFFLINE = (DOCS / "algorithms/offline.md").read_text("utf-8")


def lacks(name: str) -> list[str]:
    """What a method still needs, by file."""
    method = METHODS[name]
    found = []
    if method.loop is not None and method.loop not in LOOPS:
        found.append(f"training/pipeline.py:LOOPS: a loop {method.loop}")
    if name in EXAMPLE_SAMPLERS and name not in SELECTIONS:
        found.append("training/example_sampling.py:SELECTIONS: which completions it selects")
    if method.loss is not None:
        silent = [row.key for row in rows_of(method.loss, "loss") if not row.setting.effect]
        found += [f"objective/preference.py: a Setting that describes {key}" for key in silent]
        if f"| `preference.{method.loss.__name__}` |" not in OFFLINE:
            found.append("docs/algorithms/offline.md: a row of its loss")
    if name in PREFERENCES:
        if not shadow_knows(name):
            found.append("proof/losses.py: its formula, written a second time")
        if name not in SETTINGS:
            found.append("tests/proof/given_settings.py:SETTINGS: settings to repeat it under")
    if name not in STAGES:
        found.append("docs/stages.md: what it is for")
    return found


def shadow_knows(name: str) -> bool:
    answer = AnswerLogprob(torch.tensor(-1.0, dtype=torch.float64), reference=-1.0, length=1)
    settings = {row.key.removeprefix("loss."): row.default for row in rows_of(PREFERENCES[name], "loss")}
    try:
        if METHODS[name].learns_from[0] == "judged":
            judged_loss(name, answer, good=True, point=0.0, s=settings)
        else:
            pair_loss(name, answer, answer, settings)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_a_method_is_missing(name: str) -> None:
    lacking = lacks(name)
    assert not lacking, "\n".join(lacking)


def test_what_a_new_preference_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_loss(chosen: object, *, pull: float = 0.1) -> object:
        return chosen

    monkeypatch.setitem(PREFERENCES, "new_loss", new_loss)  # type: ignore[misc]
    monkeypatch.setitem(METHODS, "new_loss", Method("preference", ("pair",), loss=new_loss))  # type: ignore[misc]
    assert [lack.partition(":")[0] for lack in lacks("new_loss")] == [
        "objective/preference.py",
        "docs/algorithms/offline.md",
        "proof/losses.py",
        "tests/proof/given_settings.py",
        "docs/stages.md",
    ]


def test_every_kind_of_example_has_its_columns() -> None:
    assert set(COLUMNS_OF) == set(get_args(ExampleKind))


def test_a_method_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\nmethod: guesswork\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: method = 'guesswork': .*rl, sft, dpo, ipo, kto"):
        load_config(tmp_path / "run.yaml")
