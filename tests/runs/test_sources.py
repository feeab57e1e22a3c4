"""What a run reads is known by its content, and a change between a kill and a resume is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tests.conftest import policy_of

from covey.cli import main
from covey.config.load import load_config
from covey.models.policy import save_policy
from covey.rewards.contract import Reward
from covey.rewards.loading import BUILT_IN
from covey.rewards.scorer import Rewards
from covey.rollouts.learned.reward_models import reward_model
from covey.runs.inputs import files_of

REWARDS = """
import judging.scale

def varied(completion):
    from judging import late
    return judging.scale.BY * (sum(map(ord, str(completion))) % 7) + late.more
"""
HELPING = """
def double(number: int) -> int:
    '''Twice a number.

    Args:
        number: Which.
    '''
    return 2 * number
"""
ADVANTAGE = """
from .common import centre

def mine(rewards):
    return centre(rewards)
"""
TRACED = """
import json, os, sys
opened = set()
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and not arguments[2] & os.O_WRONLY:
        opened.add(os.path.realpath(os.fsdecode(arguments[0])))
sys.addaudithook(note)
from covey.cli import main
code = main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(sorted(opened), file)
sys.exit(code)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "rewards.py": REWARDS,
        "judging/__init__.py": "",
        "judging/scale.py": "BY = 1.0\n",
        "judging/late.py": "more = 0.0\n",
        "helping.py": HELPING,
        "advantage.py": ADVANTAGE.replace("from .common", "from common"),
        "common.py": "def centre(rewards):\n    return rewards - rewards.mean()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(12)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    policy = policy_of("qwen2")
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_policy(policy, tmp_path / "model")
    config = {
        "model": "model",
        "output": str(tmp_path / "run"),
        "data": {"train": "train.jsonl", "test": "test.jsonl", "chat": True},
        "rewards": ["rewards.py:varied"],
        "algorithm": {"name": "dr_grpo", "advantage": "advantage.py:mine"},
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4, "tools": ["helping.py:double"]},
        "train": {"steps": 3, "lr": 1e-3, "save_every": 1},
        "eval": {"problems": 2, "samples": 1},
        "lora": {"rank": 2},
        "threads": 1,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in ("judging", "common")]:
        del sys.modules[name]


def files(project: Path) -> dict[str, str]:
    return json.loads((project / "run/env.json").read_text())["files"]


def train(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (project / "traced.py").write_text(TRACED)
    command = [sys.executable, "traced.py", "opened.json", "train", "run.yaml", *options]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_every_file_that_a_run_opens_is_in_its_inventory(project: Path) -> None:
    assert train(project).returncode in (0, 1)
    known = {(project / n).resolve() for n in files(project)}
    root = Path(__file__).parents[2]
    ours = (
        root / "src",
        root / "packages/verify/src",
        project / "run",
        Path("/proc"),
        Path("/sys"),
        Path("/dev"),
        Path("/etc"),
        Path("/usr"),
    )
    settings = {project / n for n in ("run.yaml", "traced.py", "opened.json")}  # compared one by one
    unknown = []
    for name in json.loads((project / "opened.json").read_text()):
        path = Path(name)
        library = any(path.is_relative_to(p) for p in (sys.prefix, sys.base_prefix, *ours))
        library |= "site-packages" in path.parts
        if path.is_relative_to(project) and path.suffix == ".pyc":
            path = path.parent.parent / (path.name.partition(".")[0] + ".py")
        if path.is_file() and not library and path not in known | settings and ".cache" not in path.parts:
            unknown.append(path)
    assert unknown == []
    assert {
        "rewards.py",
        "helping.py",
        "judging/scale.py",
        "judging/late.py",
        "advantage.py",
        "common.py",
    } <= set(files(project))
    assert {"model/model.safetensors", "model/chat_template.jinja", "model/tokenizer.json"} <= set(
        files(project)
    )


def scaled(path: Path) -> None:
    weights = load_file(path)
    save_file({k: 1.05 * v for k, v in weights.items()}, path, {"format": "pt"})


CHANGES = {
    "rewards.py": lambda p: p.write_text(p.read_text() + "# other\n"),
    "judging/late.py": lambda p: p.write_text("more = 1.0\n"),
    "common.py": lambda p: p.write_text(p.read_text() + "# other\n"),
    "test.jsonl": lambda p: p.write_text("\n" + p.read_text()),
    "model/model.safetensors": scaled,
    "model/chat_template.jinja": lambda p: p.write_text("!" + p.read_text()),
    "model/generation_config.json": lambda p: p.write_text(p.read_text() + "\n"),
    "model/special_tokens_map.json": lambda p: p.write_text("{}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_named_and_refused_under_strict(project: Path, capsys, name: str) -> None:
    assert main(["train", str(project / "run.yaml"), "--inject", "step.sigterm@2"]) == 75
    there = (project / name).exists()
    CHANGES[name](project / name)
    capsys.readouterr()
    assert main(["train", str(project / "run.yaml"), "--strict"]) == 4
    says = f"{name} {'changed' if there else 'is new'} since the run began"
    assert says in capsys.readouterr().err
    assert main(["train", str(project / "run.yaml")]) in (0, 1)
    assert says in (project / "run/events.jsonl").read_text()


@pytest.mark.parametrize("name", ["env.json", "config.yaml"])
def test_a_lost_record_is_not_taken_for_sameness(project: Path, capsys, name: str) -> None:
    assert main(["train", str(project / "run.yaml"), "--inject", "step.sigterm@2"]) == 75
    (project / "run" / name).unlink()
    assert main(["train", str(project / "run.yaml"), "--strict"]) == 4
    assert f"{name} is gone since the run began" in capsys.readouterr().err


def test_nothing_is_said_where_nothing_changed(project: Path, capsys) -> None:
    assert main(["train", str(project / "run.yaml"), "--inject", "step.sigterm@2"]) == 75
    assert main(["train", str(project / "run.yaml"), "--strict"]) in (0, 1)
    assert not (project / "run/events.jsonl").exists()


def test_the_models_of_rewards_are_files_of_the_run_only_where_they_are_loaded(project: Path) -> None:
    def judged(name: str, **settings: str) -> Reward:
        return Reward(name, BUILT_IN.get(name, reward_model), settings=settings)

    resolved = load_config(values={"model": "tiny"}, folder=project)
    rewards = Rewards([judged("judge", model="of-some-server"), judged("scorer", model="model")])
    assert {n.partition("/")[0] for n in files_of(resolved, rewards)} == {"scorer", "covey's own code"}


def test_a_tokenizer_of_another_model_is_refused(project: Path, capsys) -> None:
    from covey.models.tiny import build_tokenizer

    build_tokenizer(["1+1=2 and so on"] * 3, vocab_size=400).save_pretrained(project / "model")
    tokenizer = json.loads((project / "model/tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["1"] = 399
    (project / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["train", str(project / "run.yaml")]) == 2
    assert "The tokenizer belongs to another model" in capsys.readouterr().err
