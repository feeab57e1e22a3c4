"""Each example has a short form in its comment, and runs with it."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from covey.cli import main
from covey.config.load import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def short_form(example: Path) -> list[str]:
    (options,) = re.findall(r"^# In short: (.+)$", example.read_text(encoding="utf-8"), re.MULTILINE)
    return shlex.split(options)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_accepted_in_its_short_form(example: Path) -> None:
    stages = load_config(example, short_form(example)).stages()
    assert stages[-1].config.train.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_to_its_end_in_its_short_form(example: Path, tmp_path: Path) -> None:
    if load_config(example).stages()[0].config.model != "tiny":
        pytest.skip("its model and its data are not here")
    if "proves" in example.read_text(encoding="utf-8") and shutil.which("coqc") is None:
        pytest.skip("there is no coqc here")
    assert main(["train", str(example), *short_form(example), "--output", str(tmp_path / "run")]) == 0
