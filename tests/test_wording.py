"""Rewards over completions that exist know how their model's prompts end, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli import main
from covey.models.policy import save_policy
from tests.models.templates import OPEN, policy_with, template
from tests.training.runs import start, varied

BRACKETS = template("", "[THINK]", tags=("[THINK]", "[/THINK]"))
ASKED = [{"role": "user", "content": "1+2="}]
ROWS = [
    {"prompt": ASKED, "answer": "3", "completion": completion}
    for completion in (
        r"so it is \boxed{3}",
        r"so</think>\boxed{3}",
        [{"role": "assistant", "content": r"\boxed{3}", "reasoning_content": "so"}],
    )
]
BEGUN = "def begun(completion, thought_marks):\n    return float(thought_marks.begun)\n"
ENDS_IN = (
    "def ends_in(completion, answer):\n    text = completion[0]['content']\n"
    "    if '<think>' in text and '</think>' not in text: return 0.0\n"
    "    return float(text.rpartition('</think>')[2].strip() in (answer, 'so it is ' + answer))\n"
)


def varied_chat(completion) -> float:
    """Differs between completions."""
    return varied(completion[0]["content"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model whose prompts open thoughts, a config that names it, and rows of completions."""
    save_policy(policy_with(OPEN), tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()  # nobody needs them
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "run.yaml").write_text("model: model\ndata: {train: rows.jsonl}\nrewards: [math_answer]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_score_reads_a_completion_as_the_configs_model_began_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "rows.jsonl", "run.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["reward"] for row in found["rows"]] == [0.0, 1.0, 1.0]
    assert not found["notes"]


@pytest.mark.usefixtures("folder")
def test_score_without_a_model_says_once_that_no_template_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["score", "rows.jsonl", "math_answer"]) == 0
    said = capsys.readouterr()
    assert said.err.count("no chat template is known") == 1
    assert main(["score", "rows.jsonl", "math_answer", "--json"]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1.0, 1.0, 1.0]


def test_a_model_that_cannot_be_read_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text("model: no/such\ndata: {train: rows.jsonl}\nrewards: [math_answer]\n")
    assert main(["score", "rows.jsonl", "run.yaml", "--json"]) == 0
    assert "tokenizer of model 'no/such' cannot be read" in json.loads(capsys.readouterr().out)["notes"][0]
    assert main(["stress", "run.yaml", "--json"]) == 0
    assert "tokenizer of model 'no/such' cannot be read" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize("stage", ["1-sft", None])
def test_a_pipeline_begins_with_its_own_model(
    folder: Path, stage: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "" if stage is None else f", model: {stage}"
    (folder / "run.yaml").write_text(
        "model: model\ndata: {train: rows.jsonl, completion: '{answer}'}\n"
        f"stages: [{{method: sft}}, {{method: rl, rewards: [math_answer]{named}}}]\n"
    )
    assert main(["score", "rows.jsonl", "run.yaml", "--json"]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)["rows"]] == [0.0, 1.0, 1.0]


def test_a_run_folder_is_rescored_and_scores_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_policy(policy_with(OPEN), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "begun.py").write_text(BEGUN)
    data = {"task": None, "train": tmp_path / "rows.jsonl"}
    settings = {"model": str(tmp_path / "model"), "data": data, "rewards": (varied_chat,)}
    start(tmp_path / "run", **settings, train={"steps": 1})
    for path in (tmp_path / "model").iterdir():
        path.unlink()  # the run has a tokenizer of its own
    assert main(["rescore", "run", "begun.py", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["of_groups"]
    assert groups
    assert all(value == 1.0 for group in groups for value in group["new"])


@pytest.mark.parametrize("chat_template", [OPEN, BRACKETS])
def test_stress_cuts_thoughts_off_as_the_configs_template_writes_them(
    folder: Path, chat_template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_policy(policy_with(chat_template), folder / "model")
    (folder / "mine.py").write_text(ENDS_IN)
    name = "correct inside reasoning that the prompt opens, truncated"
    assert main(["stress", "run.yaml", "mine.py:ends_in", "--json"]) == 1
    assert name in {f["attack"] for f in json.loads(capsys.readouterr().out)["accepted"]}
    assert main(["stress", "run.yaml", "--json"]) == 0  # math_answer
