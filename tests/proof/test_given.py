"""The shadow trainer repeats what is learned from given examples: imitation, preferences, whole pipelines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main
from covey.models.policy import save_policy
from covey.proof.check import Claim
from covey.proof.check_run import check_run
from covey.system.console import RunConsole
from covey_verify.errors import ConfigError
from tests.conftest import policy_of
from tests.fakes import rewrite_config
from tests.proof.cases import Model, mixed
from tests.proof.given_settings import SETTINGS
from tests.training.runs import metrics_of, start

STEPS = 4
TRAIN = {"steps": STEPS, "batch_size": 5, "lr": 3e-3, "warmup_steps": 1, "tokens_per_micro_batch": 16}
"""Two epochs with a batch across their border, and several micro-batches of uneven sizes a step."""
QUIET = RunConsole(quiet=True)


def rows_of(folder: Path) -> Path:
    """Sums with a right and a wrong answer of other lengths, two of them to each prompt but the last."""
    rows = [
        {"prompt": f"{a}+{b}=" + "9" * a, "chosen": "7" * (b + 1), "rejected": str(a) * (1 + n + b % 2)}
        for a in range(3)
        for b in range(2)
        for n in range(2)
    ][:-1]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, model: Model, method: str, output: str = "run", **settings: Any) -> Path:
    """A run of four steps over pairs; of `sft` over the chosen answers."""
    data = {"task": None, "train": rows_of(folder), "test": None, "held_out": 0.2}
    if method == "sft":
        data["completion"] = "chosen"
    own = {"data": data, "train": TRAIN, "rewards": (), **settings}
    start(folder / output, model=settings.pop("model", str(model.folder)), method=method, **own)
    return folder / output


def wrong(found: list[Claim]) -> list[Claim]:
    """Those that do not hold."""
    return [claim for claim in found if not claim.holds]


def largest(found: list[Claim], claim: str) -> float:
    """The largest difference that one of the claims tells."""
    evidence = next(f.evidence for f in found if claim in f.sentence)
    return float(evidence.split()[2])


@pytest.mark.parametrize(
    ("method", "loss"), [(method, loss) for method in SETTINGS for loss in SETTINGS[method]]
)
def test_every_preference_is_learned_alike(
    tmp_path: Path, model: Model, method: str, loss: Mapping[str, object]
) -> None:
    run = train(tmp_path, model, method, loss=loss)
    found = check_run(run, STEPS, QUIET)
    assert wrong(found) == []
    assert len(found) == 3
    assert largest(found, "gradients") < 1e-4
    assert largest(found, "loss and metrics") < 1e-4
    assert largest(found, "saved weights") < 5e-3
    losses = [m["loss"] for m in metrics_of(run)]
    assert len(set(losses)) == STEPS, "the policy moves, so its reference is left behind"


def test_answers_are_imitated_alike(tmp_path: Path, model: Model) -> None:
    found = check_run(train(tmp_path, model, "sft"), STEPS, QUIET)
    assert wrong(found) == []
    assert largest(found, "loss and metrics") < 1e-4


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_adapters_and_rounded_weights_learn_alike(tmp_path: Path, model: Model, method: str) -> None:
    assert wrong(check_run(train(tmp_path, model, method, "lora", lora={"rank": 2}), STEPS, QUIET)) == []
    assert wrong(check_run(train(tmp_path, model, method, "half", dtype="bfloat16"), STEPS, QUIET)) == []


@pytest.mark.parametrize("method", ["sft", "dpo", "orpo"])
def test_what_tools_say_in_an_answer_is_read_and_not_learned(tmp_path: Path, method: str) -> None:
    def answer(n: int, last: str) -> list[dict[str, str]]:
        said = ("assistant", "6*7"), ("tool", "4" * (n + 1)), ("assistant", last)
        return [{"role": role, "content": content} for role, content in said]

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "chosen": answer(n, str(n)),
            "rejected": answer(n + 1, "5"),
        }
        for n in range(4)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": None, "train": tmp_path / "chats.jsonl", "completion": "chosen", "held_out": 0}
    settings = {"data": {**data, "chat": True}, "train": {**TRAIN, "batch_size": 3}, "rewards": ()}
    save_policy(policy_of("qwen3"), tmp_path / "model")
    start(tmp_path / "run", model=str(tmp_path / "model"), method=method, **settings)
    assert wrong(check_run(tmp_path / "run", STEPS, QUIET)) == []


def test_the_command_repeats_a_run_that_samples_nothing(
    tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, model, "dpo")
    capsys.readouterr()
    assert main(["check", str(run), "--steps", str(STEPS)]) == 0
    assert capsys.readouterr().out.count("ok   ") == 3
    (tmp_path / "run.yaml").write_text(f"method: dpo\nmodel: {model.folder}\ndata: {{train: pairs.jsonl}}\n")
    assert main(["check", str(tmp_path / "run.yaml")]) != 0
    assert "to repeat the first steps of a run of this method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("dpo", "seed: 0", "seed: 1"),
        ("dpo", "lr: 0.003", "lr: 0.004"),
        ("dpo", "loss: {}", "loss: {beta: 0.2}"),
        ("sft", "batch_size: 5", "batch_size: 4"),
    ],
)
def test_a_record_that_does_not_follow_is_found(
    tmp_path: Path, model: Model, method: str, old: str, new: str
) -> None:
    run = train(tmp_path, model, method)
    rewrite_config(run / "config.yaml", old, new)
    assert wrong(check_run(run, STEPS, QUIET, trust=True))


def test_examples_that_have_changed_since_are_named(tmp_path: Path, model: Model) -> None:
    run, rows = train(tmp_path, model, "dpo"), tmp_path / "pairs.jsonl"
    rows.write_text(rows.read_text().replace('"77"', '"78"'))
    with pytest.raises(ConfigError, match=r"pairs\.jsonl has changed since .* read it"):
        check_run(run, STEPS, QUIET)


def test_a_reward_model_cannot_be_repeated(tmp_path: Path, model: Model) -> None:
    run = train(tmp_path, model, "reward_model")
    with pytest.raises(ConfigError, match=r"no step can be repeated: .* knows no reward models"):
        check_run(run, STEPS, QUIET)


STAGES: list[dict[str, Any]] = [
    {"method": "sft", "train": {**TRAIN, "steps": 2}},
    {"method": "dpo", "train": {**TRAIN, "steps": 2}, "data": {"held_out": 0.2}},
    {"method": "reward_model", "train": {**TRAIN, "steps": 1}},
    {"method": "rl", "rewards": (mixed,), "train": {"lr": 1e-3, "steps": 2, "save_every": 2}},
]


def test_each_stage_of_a_pipeline_begins_with_what_the_one_before_has_left(
    tmp_path: Path, model: Model
) -> None:
    data = {"task": None, "train": rows_of(tmp_path), "completion": "chosen", "test": None}
    rollout = {"prompts_per_step": 2, "group_size": 3, "max_tokens": 8}
    start(tmp_path / "run", model=str(model.folder), data=data, rollout=rollout, rewards=(), stages=STAGES)
    said: list[str] = []
    console = RunConsole(quiet=True)
    console.say = lambda text, *_: said.append(text)  # type: ignore[method-assign]
    found = check_run(tmp_path / "run", 2, console)
    assert wrong(found) == []
    assert [sum(f.sentence.startswith(stage) for f in found) for stage in ("1-sft", "2-dpo", "4-rl")] == [
        3,
        3,
        5,
    ]
    assert said == ["skipping 3-reward_model: the second trainer knows no reward models"]
    (tmp_path / "run" / "5-rl").mkdir()  # a stage that has only begun
    shutil.copy(tmp_path / "run" / "4-rl" / "config.yaml", tmp_path / "run" / "5-rl")
    check_run(tmp_path / "run", 1, console)
    assert said[-1] == "skipping 5-rl: no step has been recorded yet"
    alone = check_run(tmp_path / "run" / "2-dpo", 2, QUIET)
    assert wrong(alone) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert wrong(check_run(tmp_path / "moved" / "4-rl", 2, QUIET)) == []


def test_a_stage_that_begins_with_another_model_is_found(tmp_path: Path, model: Model) -> None:
    """What its record says of that is not believed."""
    (tmp_path / "run").mkdir()
    train(tmp_path, model, "sft", "run/1-sft")
    train(tmp_path, model, "dpo", "run/2-dpo")
    found = check_run(tmp_path / "run", STEPS, QUIET)
    assert {claim.sentence.partition(":")[0] for claim in wrong(found)} == {"2-dpo"}
