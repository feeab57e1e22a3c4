"""Runs whose model calls tools: recorded, proved from the record, resumed to the bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.cli import main
from covey.insight.pages.steps import group_page
from covey.insight.rescore import rescore
from covey.insight.sample_command import sample_command
from covey.insight.show import show_group, show_step
from covey.models.policy import save_policy
from covey.models.tiny import build_model, build_tokenizer
from covey.rewards.loading import load_rewards
from covey.runs.rollouts import read_rollouts
from covey.sampling.tools import turns
from covey.trl import GRPOConfig, GRPOTrainer
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError
from tests.conftest import policy_of
from tests.proof.cases import Model, make_model, mixed, trained_and_repeated
from tests.training.runs import check_resumes_alike, metrics_of, start


@pytest.fixture(autouse=True)
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model writes no call: here each turn that ends by itself is one."""
    call = ToolCall("calculate", {"expression": "6*7"})
    monkeypatch.setattr(turns, "calls_in_text", lambda text: [call] if text else [])
    monkeypatch.setattr(turns, "turn_reader", lambda *_: lambda turn, *_: [call] if len(turn) > 1 else [])
    monkeypatch.setattr(turns, "answer_tokens", lambda *_: [40, 41, 42])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


TOOLS = {"functions": ["calculate"], "max_calls": 2}
ROLLOUT = {"prompts_per_step": 3, "group_size": 3, "max_tokens": 24, "tools": TOOLS}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 2.0}}},
    "top_k": {"algorithm": {"name": "dapo", "filter": None}, "rollout": {"top_k": 40}},
    "prefixes": {"algorithm": {"name": "grpo", "advantage": "prefix_tree"}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_tools_is_proved_from_its_record(name: str, tmp_path: Path, model: Model) -> None:
    case = CASES[name]
    rollout = {**ROLLOUT, **case.get("rollout", {})}
    settings = {"rewards": (mixed,), "algorithm": case["algorithm"], "rollout": rollout}
    train = {"lr": 1e-3, "updates_per_batch": 2, "tokens_per_micro_batch": 200}
    steps = trained_and_repeated(tmp_path / "run", model, 2, train=train, **settings)
    assert all(step.gradient < 1e-4 and step.advantages < 1e-5 for step in steps)
    arrays = np.load(tmp_path / "run" / "rollouts" / "step_000001.npz")
    assert 0 < (~arrays["sampled"]).sum() < len(arrays["tokens"])
    for step in metrics_of(tmp_path / "run"):
        assert step["tools/turns"] >= step["tools/used"] > 0
        assert step["tools/failed"] == 0
        assert step["mismatch/max"] == 0, "every turn was sampled with the trainer's bits"


def test_a_run_with_tools_resumes_to_the_bit(tmp_path: Path, model: Model) -> None:
    settings: dict[str, Any] = {"model": str(model.folder), "rewards": (mixed,), "algorithm": "grpo"}
    settings |= {"rollout": ROLLOUT, "train": {"steps": 3, "save_every": 1, "lr": 1e-3}}
    check_resumes_alike(tmp_path, **settings)


def test_tools_answer_what_is_sampled_ahead(tmp_path: Path, model: Model) -> None:
    rollout = {**ROLLOUT, "staleness": 1}
    train = {"steps": 3, "lr": 1e-3}
    start(tmp_path / "run", model=str(model.folder), rewards=(mixed,), rollout=rollout, train=train)
    assert all(m["tools/used"] > 0 for m in metrics_of(tmp_path / "run"))
    arrays = np.load(tmp_path / "run" / "rollouts" / "step_000003.npz")
    assert len(arrays["versions"]) == len(arrays["sampled"])


def test_a_policy_that_stays_has_not_moved(tmp_path: Path, model: Model) -> None:
    """Of inserted tokens no log-prob was recorded: counted, they would look like motion."""
    train = {"steps": 3, "lr": 0.0}
    start(tmp_path / "run", model=str(model.folder), rewards=(mixed,), rollout=ROLLOUT, train=train)
    assert [m["kl/start"] for m in metrics_of(tmp_path / "run")[1:]] == [0.0, 0.0]


STOP = tuple("aeiou0123456789")


def collecting(folder: Path, method: str, chat: bool) -> dict[str, Any]:
    """A stage that samples with tools; prompts are chats or texts."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}] if chat else f"{i}+1="} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_policy(policy_of("qwen3"), folder / "model")
    rollout = {"prompts_per_step": 4, "group_size": 6, "max_tokens": 60, "tools": TOOLS, "stop": STOP}
    data = {"task": None, "train": folder / "rows.jsonl"}
    return {"model": str(folder / "model"), "method": method, "data": data, "rollout": rollout}


def by_letters(completion: list[dict[str, str]]) -> float:
    """Of a chat: correct for some, by the text."""
    return (sum(map(ord, completion[0]["content"])) % 7) / 3


@pytest.mark.parametrize("method", ["pairs", "rejection_sampling"])
def test_examples_of_completions_with_tools_say_who_said_what(tmp_path: Path, method: str) -> None:
    settings = collecting(tmp_path, method, chat=True)
    start(tmp_path / "run", **settings, rewards=(by_letters,), train={"steps": 3})
    made = [json.loads(line) for line in (tmp_path / "run" / "examples.jsonl").read_text().splitlines()]
    answers = [row[name] for row in made for name in ("completion", "chosen", "rejected") if name in row]
    roles = [tuple(message["role"] for message in answer) for answer in answers]
    assert any("tool" in own for own in roles)
    assert {own[0] for own in roles} == {own[-1] for own in roles} == {"assistant"}
    assert {m["content"] for answer in answers for m in answer if m["role"] == "tool"} == {"42"}


def test_examples_of_plain_text_with_tools_are_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be told from the model's words; set data\.chat: true"):
        start(tmp_path / "run", **collecting(tmp_path, "pairs", chat=False), rewards=(mixed,))
    assert not list((tmp_path / "run").glob("rollouts/*"))


def turned(completion: str, turns: list[dict[str, str]]) -> float:
    """How often a tool answered."""
    return float(sum(turn["role"] == "tool" for turn in turns))


def test_recorded_completions_are_judged_with_their_turns(tmp_path: Path) -> None:
    settings = collecting(tmp_path, "rl", chat=True)
    start(tmp_path / "run", **settings, rewards=(turned,), train={"steps": 2, "lr": 1e-3})
    again = rescore(tmp_path / "run", load_rewards([turned], tmp_path), 2)
    assert any(group.old.any() for group in again)
    assert all(np.array_equal(group.old, group.new) for group in again)


def reads_schemas(completion: str, template_arguments: dict[str, Any]) -> float:
    """Whether a reward that shows the chat to a model of its own, as a reward model does, has the tools."""
    return float("calculate" in json.dumps(template_arguments))


def test_recorded_completions_are_judged_in_chats_that_show_the_tools(tmp_path: Path) -> None:
    settings = collecting(tmp_path, "rl", chat=True)
    start(tmp_path / "run", **settings, rewards=(by_letters,), train={"steps": 1, "lr": 1e-3})
    again = rescore(tmp_path / "run", load_rewards([reads_schemas], tmp_path), 1)
    assert all(group.new.tolist() == [1.0] * len(group.new) for group in again)


def test_segments_and_tools_are_refused_together(tmp_path: Path, model: Model) -> None:
    with pytest.raises(ConfigError, match="segment_difference resamples completions"):
        start(
            tmp_path / "run",
            model=str(model.folder),
            rollout=ROLLOUT,
            algorithm={"name": "grpo", "advantage": "segment_difference"},
        )


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Which.
    """
    return 2 * number


class Game:
    """As TRL's environments are."""

    def reset(self, **columns: object) -> None:
        """Begin."""
        self.calls = 0

    def ask(self) -> str:
        """Ask."""
        self.calls += 1
        return "42"


class Puzzle(Game):
    """Tells what it is about."""

    def reset(self, **columns: object) -> str:  # type: ignore[override]
        """Begin with the question."""
        super().reset(**columns)
        return f"Which number? {random.random()}"


def right(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    return [float(sum(map(ord, c[0]["content"]))) for c in completions]


def test_tools_of_a_script_for_trl(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["1+2=3"], vocab_size=300)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=40,
        max_tool_calling_iterations=2,
        use_cpu=True,
    )
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(4)]
    given = {"model": build_model(tokenizer, 0), "processing_class": tokenizer, "train_dataset": rows}
    made = GRPOTrainer(reward_funcs=right, args=arguments, tools=[double], **given)
    found = made.settings["rollout.tools"]
    assert found == {"functions": [found["functions"][0]], "environment": None, "max_calls": 2}
    assert found["functions"][0].endswith("test_runs:double") or found["functions"][0].endswith(".py:double")
    with pytest.raises(ConfigError, match="must be a function or class of a file"):
        GRPOTrainer(reward_funcs=right, args=arguments, tools=[lambda number: number], **given)
    playing = GRPOTrainer(reward_funcs=right, args=arguments, environment_factory=Game, **given)
    assert playing.settings["rollout.tools"]["environment"].endswith(":Game")
    with pytest.raises(ConfigError, match="without a train_dataset needs `max_steps`"):
        GRPOTrainer(reward_funcs=right, environment_factory=Game, **given | {"train_dataset": None})


def test_an_environment_may_bring_the_prompts(tmp_path: Path) -> None:
    """As in TRL: without a dataset each prompt of the run is what `reset` returns."""
    tokenizer = build_tokenizer(["1+2=3"], vocab_size=300)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=8, use_cpu=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=build_model(tokenizer, 0), processing_class=tokenizer, reward_funcs=right, args=arguments,
        environment_factory=Puzzle,
    )  # fmt: skip
    trainer.train()
    logs = [read_rollouts(tmp_path / "run", step).rows for step in range(1, 4)]
    asked = {(r["group"], step): r["prompt"][0]["content"] for step, rows in enumerate(logs) for r in rows}
    assert len(asked) == 6
    assert len(set(asked.values())) == 6
    assert all(prompt.startswith("Which number? 0.") for prompt in asked.values())


def test_a_model_is_tried_with_its_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, template = [{"role": "user", "content": "2*3="}], {"tools": [{}], "enable_thinking": False}
    words = sample_command(tmp_path, chat, template, ["python", "a.py:f"])
    assert "--tools=python,a.py:f" in words
    assert "enable_thinking" in words
    assert '"tools"' not in words
    save_policy(policy_of("qwen3"), tmp_path / "model")
    asked = ["sample", str(tmp_path / "model"), "--chat", "2*3=", "--max-tokens", "20"]
    assert main([*asked, "--tools", "calculate"]) == 0
    assert capsys.readouterr().out.startswith("user: 2*3=\nassistant: ")
    assert main([*asked, "--tools", "calculat"]) == 2
    assert "did you mean calculate?" in capsys.readouterr().err


def test_a_group_shows_what_tools_said(tmp_path: Path) -> None:
    settings = collecting(tmp_path, "rl", chat=True)
    start(tmp_path / "run", **settings, rewards=(turned,), train={"steps": 1, "lr": 1e-3})
    _, lines = show_group(tmp_path / "run", 1, 0)
    assert "  > 42" in lines
    # The tokens of a step's list are those of its metrics: what the model drew.
    (step,) = metrics_of(tmp_path / "run")
    groups = show_step(tmp_path / "run", 1)[0]["groups"]
    assert np.mean([group["tokens"] for group in groups]) == pytest.approx(step["length/mean"])
    log = read_rollouts(tmp_path / "run", 1)
    answered = [row for row in log.rows if row.get("turns")]
    assert answered
    for row in answered:
        assert row["inserted"] == 3 * sum(turn["role"] == "tool" for turn in row["turns"])
    lengths = [n for group in log.groups for n in group_page(tmp_path / "run", 1, group)["lengths"]]
    assert np.mean(lengths) == pytest.approx(step["length/mean"])
    shown = [line for group in log.groups for line in show_group(tmp_path / "run", 1, group)[1]]
    assert any(
        f"{answered[0]['tokens']} tokens ({answered[0]['inserted']} inserted)" in line for line in shown
    )
