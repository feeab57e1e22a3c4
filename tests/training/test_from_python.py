"""Runs begun from Python with functions of one's own: measured, explained and continued, from there and from
the command line, or refused with what to do."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import covey
from covey.cli import main
from covey.config.load import load_config
from covey.errors import Stopped
from covey_verify.errors import ConfigError
from covey_verify.usercode import load_function

SMALL: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 16, "test_size": 4},
    "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
    "train": {"steps": 2, "lr": 1e-3, "save_every": 1},
    "eval": {"problems": 2, "samples": 1},
    "threads": 1,
}
SCRIPT = f"""
import covey

def brief(completion):
    return float(sum(map(ord, completion)))

if __name__ == "__main__":
    settings = {SMALL!r}
    covey.train(**settings, rewards=[{{brief: 0.5}}], output="runs/quick", quiet=True)
    assert covey.evaluate("runs/quick", quiet=True).summary()
    assert covey.resume("runs/quick", quiet=True, train={{"steps": 2}}).steps == 2
"""


class Judge:
    """A reward that is an object."""

    def __call__(self, completion: str) -> float:
        return float(sum(map(ord, completion)))


def plain_function(completion: str) -> float:
    return float(sum(map(ord, completion)))


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env=environment
    )


def test_a_script_and_then_the_command_line(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "quick.py").write_text(SCRIPT)
    begun = command(tmp_path, "quick.py")
    assert begun.returncode == 0, begun.stderr
    recorded = yaml.safe_load((tmp_path / "runs" / "quick" / "config.yaml").read_text())
    assert recorded["rewards"] == [{"quick.py:brief": 0.5}]
    monkeypatch.chdir(tmp_path)
    for verb in ("eval", "explain", "resume"):
        # A run of two steps may well have learned nothing, or worse: exit code 1 is a result.
        assert main([verb, "runs/quick", "--json"]) in (0, 1)
        assert "error" not in json.loads(capsys.readouterr().out)


def test_a_script_that_begins_a_run_when_imported_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "begins.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    (tmp_path / "run.yaml").write_text("rewards: ['begins.py:brief']\ndata: {task: sums}\n")
    assert main(["eval", str(tmp_path / "run.yaml")]) == 2
    assert 'move the start of the run below `if __name__ == "__main__":`' in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def objects() -> dict[str, Any]:
    return {
        "Judge": Judge(),
        "<lambda>": lambda completion: float(sum(map(ord, completion))),
        "plain_function": functools.partial(plain_function),
    }


@pytest.mark.parametrize("name", ["Judge", "<lambda>", "plain_function"])
def test_objects_are_given_again(tmp_path: Path, capsys, name: str) -> None:
    reward, run = objects()[name], tmp_path / "run"
    covey.train(**SMALL, rewards=[reward], output=run, quiet=True)
    again = f"covey.resume({str(run)!r}, rewards=[...])"
    for verb in ("eval", "resume", "check"):
        assert main([verb, str(run)]) == 2
        said = capsys.readouterr().err
        assert f"`{name}` was a Python object" in said
        assert again in said
    assert main(["explain", str(run)]) == 0
    assert main(["eval", str(run), "--rewards", "[math_answer]"]) == 0
    with pytest.raises(ConfigError, match="was a Python object"):
        covey.evaluate(run, quiet=True)
    assert covey.evaluate(run, rewards=[reward], quiet=True).record()["outcome"]
    assert covey.resume(run, rewards=[reward], quiet=True).steps == 2
    assert isinstance(covey.explain(run), list)
    assert callable(covey.evaluate)  # no module of that name took its place


def test_resume_from_python_changes_settings_and_keeps_the_rest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {**SMALL, "train": {**SMALL["train"], "steps": np.int64(2)}}
    covey.train(**settings, rewards=[plain_function], output=run, quiet=True)
    (run / "result.json").unlink()
    assert covey.resume(run, train={"steps": 3}, quiet=True).steps == 3
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["train"]["lr"] == 1e-3
    (reward,) = recorded["rewards"]
    assert load_function(reward, Path.cwd()) is plain_function


def test_a_function_that_was_edited_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def mine(completion):\n    return 0.25\n")
    before = load_function("edited.py:mine", tmp_path)
    assert load_function("edited.py:mine", tmp_path) is before
    file.write_text("def mine(completion, answer):\n    return 0.5\n")
    assert load_function("edited.py:mine", tmp_path)("x", "y") == 0.5


def test_a_pipeline_from_python_continues_from_the_command_line(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    stages = [{"method": "sft"}, {"method": "rl", "rewards": [plain_function]}]
    covey.train(**SMALL, stages=stages, output=run, quiet=True)
    (run / "2-rl" / "result.json").unlink()
    assert main(["resume", str(run), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["2-rl"]["steps"] == 2


def test_a_model_is_measured_from_python(tmp_path: Path) -> None:
    run = tmp_path / "run"
    covey.train(**SMALL, rewards=[plain_function], output=run, quiet=True)
    whole = covey.evaluate(run, quiet=True).record()
    by_model = {k: SMALL[k] for k in ("data", "rollout", "eval")}
    found = covey.evaluate(run / "final", **by_model, rewards=[plain_function], quiet=True)
    assert found.record() == whole


def test_functions_of_packages_are_named_by_their_import_path(tmp_path: Path) -> None:
    package = tmp_path / "judges_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("HALF = 0.5\n")
    (package / "rewards.py").write_text("from .parts import HALF\n\ndef half(completion):\n    return HALF\n")
    assert load_function("judges_of_mine.rewards:half", tmp_path)("x") == 0.5
    with pytest.raises(ConfigError, match="judges_of_yours cannot be imported here"):
        load_function("judges_of_yours:half", tmp_path)
    with pytest.raises(ConfigError, match="defines no function 'whole'; it has half"):
        load_function("judges_of_mine.rewards:whole", tmp_path)
    resolved = load_config(values={"rewards": [load_function("judges_of_mine.rewards:half", tmp_path)]})
    assert callable(resolved.config.rewards[0])


def test_objects_of_the_caller_are_looked_through_for_garbage_again(tmp_path: Path) -> None:
    gc.unfreeze()  # the tests' process has frozen what it imported
    before = gc.get_freeze_count()
    frozen = list[int]()

    def watching(completion: str) -> float:
        frozen.append(gc.get_freeze_count())
        return float(len(completion))

    try:
        covey.train(**SMALL, rewards=[watching], output=str(tmp_path / "run"), quiet=True)
        assert frozen
        assert min(frozen) > 10_000
        assert gc.get_freeze_count() <= before
    finally:
        gc.freeze()


def test_what_a_program_has_frozen_itself_stays_so(tmp_path: Path) -> None:
    gc.freeze()  # as the tests' process has, in pytest_collection_finish
    before = gc.get_freeze_count()
    covey.train(**SMALL, rewards=[plain_function], output=str(tmp_path / "run"), quiet=True)
    assert gc.get_freeze_count() > 0.9 * before  # some of them have died since


def test_an_interrupt_from_python_says_how_to_continue_and_continues(tmp_path: Path) -> None:
    """Its message named no way to continue, and a newcomer waited for a KeyboardInterrupt."""
    folder = tmp_path / "run"

    def interrupting(completion: str) -> float:
        # The rehearsal before the run calls it too, when no step is there to save.
        if (folder / "metrics.jsonl").is_file() and not (tmp_path / "sent").exists():
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), signal.SIGINT)
        return float(sum(map(ord, completion)))

    call = re.escape(f"covey.resume({str(folder)!r})")
    with pytest.raises(Stopped, match=rf"saved after step 1 of 2 .* Continue with: {call}"):
        covey.train(**SMALL, rewards=[interrupting], output=folder, quiet=True)
    assert covey.resume(folder, rewards=[interrupting], quiet=True).steps == 2
