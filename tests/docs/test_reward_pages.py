"""What docs/rewards.md and docs/sandbox.md say is run: files, configs, commands and their exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from covey.cli import main
from covey.config.schema import Config, Sandbox
from covey.rewards.loading import BUILT_IN, load_rewards
from covey.rollouts.learned import LEARNED
from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox.choice import choose

DOCS = Path(__file__).parents[2] / "docs"
REWARDS = (DOCS / "rewards.md").read_text(encoding="utf-8")
SANDBOX = (DOCS / "sandbox.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", REWARDS, re.DOTALL))
COMMANDS = re.findall(r"^covey (.*?) +# exit code (\d)$", REWARDS, re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", REWARDS + SANDBOX, re.DOTALL))
def test_configs_can_be_used(block: str, project: Path) -> None:
    config = Config(**yaml.safe_load(block))
    if "code_tests" in block or "proves" in block:
        try:
            choose()
        except SandboxUnavailable as error:
            pytest.skip(str(error))
    if config.rewards:
        assert load_rewards(config.rewards, project, learned=LEARNED).verdict.name in block
    assert isinstance(config.sandbox, Sandbox)


@pytest.mark.parametrize(("command", "code"), COMMANDS)
def test_commands_end_as_they_are_said_to(command: str, code: str, project: Path, capsys) -> None:
    assert main(command.split()) == int(code)
    out = capsys.readouterr().out
    for line in re.findall(r"^naive: .*$", REWARDS, re.MULTILINE) if "naive" in command else ():
        assert line in out


def test_there_is_something_to_run() -> None:
    assert set(FILES) == {"mine.py", "naive.py", "data.jsonl", "done.jsonl"}
    assert len(COMMANDS) == 3


def test_every_built_in_reward_is_explained() -> None:
    assert not [name for name in (*BUILT_IN, *LEARNED) if f"`{name}`" not in REWARDS]
