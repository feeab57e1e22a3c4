"""The pages' own tasks: their rewards pay what a model writes, and README's model learns its task."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import covey
from covey.commands.real_model import real_model

ROOT = Path(__file__).parents[2]
DATES = ROOT / "examples/dates"


def reward_of(page: str) -> Callable[..., float]:
    """The reward that a page defines and its config names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "chat: true" in text
    (source,) = re.findall(r"```python\n(# rewards\.py\n.*?)```", text, re.DOTALL)
    (named,) = set(re.findall(r"rewards: \[rewards\.py:(\w+)", text))
    names: dict[str, Callable[..., float]] = {}
    exec(source, names)
    return names[named]


def test_the_tutorials_reward_reads_the_answer_of_a_chat_model() -> None:
    """It took the whole text for a number: of a sentence it paid 0, whatever it said."""
    pays = reward_of("docs/tutorial.md")
    said = (
        "17 * 3 = 51.",
        "The product is **51**",
        "51",
        "It is 1,051",
        "I do not know",
        "17 * 3",
        "51 or 52",
    )
    assert [pays(completion=one, answer="51") for one in said] == [1, 1, 1, 0, 0, 0, 0]


def test_the_reward_of_the_readme_pays_parts_of_a_date() -> None:
    pays = reward_of("README.md")
    said = ("2023-05-21", " 2023-05-21\n", "2023-05-22", "2023-5-21", "2023-05-21.", "May 21, 2023", "")
    expected = [1, 1, 0.2, 0.2, 0.2, 0, 0]
    found = [pays(completion=one, answer="2023-05-21") for one in said]
    assert found == pytest.approx(expected)
    assert pays(completion="2023-05-21-00-00", answer="2023-05-21") < 0.2, "writing on shall not pay"


def test_the_files_of_the_readmes_task_are_there() -> None:
    (shown,) = re.findall(r"```yaml\n(# run\.yaml\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load((DATES / "run.yaml").read_text())


@pytest.mark.slow
@pytest.mark.network
def test_the_readmes_model_learns_its_task(tmp_path: Path) -> None:
    """On a real model: greedy and sampled accuracy on held-out dates rise from about 0 to about 90 %."""
    for file in DATES.glob("*.*"):
        shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "rows.py"], cwd=tmp_path, check=True)
    output = tmp_path / "out"
    result = covey.train(tmp_path / "run.yaml", model=str(real_model(print)), output=output)
    assert result.conclusion.word == "learned"
