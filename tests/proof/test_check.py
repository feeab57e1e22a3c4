"""`covey check` proves a right step, and notices a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from covey.cli import main
from covey.learner import batching
from covey.models.policy import Policy
from tests.fakes import rewrite_config, rewrite_rollouts, rows_of
from tests.proof.cases import make_model

CONFIG = {
    "model": "tiny",
    "data": {"task": "last_digit", "train_size": 32, "test_size": 8},
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
}


def findings(tmp_path: Path, capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[int, list]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **settings}))
    code = main(["check", str(tmp_path / "run.yaml"), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "reinforce_pp", "entropy_80_20"])
def test_a_right_step_passes(tmp_path: Path, capsys, algorithm: str) -> None:
    code, found = findings(tmp_path, capsys, algorithm=algorithm)
    assert [f["sentence"] for f in found if not f["holds"]] == []
    assert code == 0
    assert len(found) == 7


@pytest.mark.parametrize("algorithm", ["kl_cov", "fipo", "dro", "ppo", "vapo", "real", "grpo_prefix_tree"])
def test_every_kind_of_estimator_and_loss_goes_the_right_way(tmp_path: Path, capsys, algorithm: str) -> None:
    code, found = findings(tmp_path, capsys, algorithm=algorithm, train={"updates_per_batch": 2})
    assert [f["sentence"] for f in found if not f["holds"]] == []
    assert code == 0


OWN = """
def wrong(ratio, advantages):
    return ratio * advantages

def undetached(ratio, advantages, logprobs):
    return -ratio * advantages * logprobs

def reversed(rewards):
    return rewards.mean() - rewards

def reward(rewards):
    return rewards
"""
SIDE, STEP = "the loss pulls each", "a small step makes w"


@pytest.mark.parametrize(
    ("axis", "function", "fails"),
    [
        ("surrogate", "wrong", [SIDE, STEP]),
        ("surrogate", "undetached", [SIDE, STEP]),
        ("advantage", "reversed", [STEP]),
        ("advantage", "reward", []),
    ],
)
def test_an_own_function_that_goes_the_wrong_way_is_noticed(
    tmp_path: Path, capsys, axis: str, function: str, fails: list[str]
) -> None:
    """Each of them passed: the gradient of a wrong loss is the same in pieces, too."""
    (tmp_path / "own.py").write_text(OWN)
    algorithm = {"name": "grpo", axis: f"own.py:{function}"}
    code, found = findings(tmp_path, capsys, algorithm=algorithm)
    assert [f["sentence"][: len(fails[n])] for n, f in enumerate(f for f in found if not f["holds"])] == fails
    assert code == int(bool(fails))
    assert main(["check", str(tmp_path / "run.yaml")]) == code
    assert ("it subtracts no baseline" in capsys.readouterr().out) == (function == "reward")


def test_small_steps_leave_the_weights_as_they_were(tmp_path: Path, capsys) -> None:
    """The claim about a learning rate of 0 comes after them, and a model of the caller's is not trained."""
    code, found = findings(tmp_path, capsys, algorithm="grpo", lora={"rank": 4})
    assert (code, found[-1]["holds"]) == (0, True)


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 3}])
def test_a_truncated_sampler_is_checked_too(tmp_path: Path, capsys, monkeypatch, truncation: dict) -> None:
    rollout = {**CONFIG["rollout"], **truncation}
    code, found = findings(tmp_path, capsys, algorithm="dppo", rollout=rollout)
    assert [f["sentence"] for f in found if not f["holds"]] == []
    assert code == 0
    monkeypatch.setattr(batching.SamplingMask, "join", lambda _: None)  # scored as if all could be drawn
    code, found = findings(tmp_path, capsys, algorithm="dppo", rollout=rollout)
    assert code == 1
    assert [f["sentence"][:19] for f in found if not f["holds"]] == ["sampler and trainer"]


def test_a_model_whose_rows_depend_on_their_company_is_noticed(tmp_path: Path, capsys, monkeypatch) -> None:
    token_outputs = Policy.token_outputs

    def crowded(self, packed, temperature, reference=None):
        outputs = token_outputs(self, packed, temperature, reference)
        return outputs._replace(logprobs=outputs.logprobs * (1 + len(packed.place) / 1000))

    monkeypatch.setattr(Policy, "token_outputs", crowded)
    code, found = findings(tmp_path, capsys)
    assert code == 1
    assert "the importance ratio" in {f["sentence"][:20] for f in found if not f["holds"]}


def test_a_sampler_at_another_temperature_is_noticed(tmp_path: Path, capsys, monkeypatch) -> None:
    token_outputs = Policy.token_outputs
    monkeypatch.setattr(
        Policy, "token_outputs", lambda self, packed, t, ref=None: token_outputs(self, packed, t * 1.1, ref)
    )
    code, found = findings(tmp_path, capsys)
    assert code == 1
    assert [f["sentence"][:19] for f in found if not f["holds"]] == ["sampler and trainer"]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A short run with a reward of the user's that always differs."""
    (tmp_path / "own.py").write_text(
        "def varied(completion):\n    return sum(map(ord, completion)) % 7 / 3\n"
    )
    train = {"steps": 3, "lr": 1e-4, "save_every": 2, "updates_per_batch": 2}
    make_model(tmp_path / "model")
    settings = {
        **CONFIG,
        "model": "model",
        "rewards": ["own.py:varied"],
        "algorithm": "grpo",
        "threads": 1,
        "train": train,
        "eval": {"problems": 2, "samples": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, "output": str(tmp_path / "run")}))
    main(["train", str(tmp_path / "run.yaml")])
    return tmp_path / "run"


def repeated(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, bool]]:
    """Exit code of `covey check` on a run, and whether each claim holds by its first words."""
    capsys.readouterr()
    code = main(["check", str(run), "--steps", "3", *more, "--json"])
    found = json.loads(capsys.readouterr().out)
    return code, {f["sentence"]: f["holds"] for f in found}


def test_a_run_that_was_made_is_repeated_and_proved(recorded: Path, capsys) -> None:
    code, claims = repeated(recorded, capsys)
    assert code == 0
    assert len(claims) == 12


@pytest.mark.parametrize(
    ("file", "old", "new", "claim"),
    [
        ("config.yaml", "temperature: 1.0", "temperature: 0.9", "the recorded log-probs follow"),
        ("rollouts/step_000001.jsonl", "", "a quarter more", "the advantages follow"),
        ("config.yaml", "clip_low: 0.2", "clip_low: 0.00001", "the gradients follow"),
        ("config.yaml", "lr: 0.0001", "lr: 0.0002", "the saved weights follow"),
    ],
)
def test_a_record_that_does_not_follow_is_named(
    recorded: Path, capsys, file: str, old: str, new: str, claim: str
) -> None:
    if file == "config.yaml":
        rewrite_config(recorded / file, old, new)
    else:  # sealed anew, as somebody can who wants it to pass
        changed = [
            {**row, "reward": row["reward"] + (row["sample"] == 0) / 4} for row in rows_of(recorded / file)
        ]
        rewrite_rollouts(recorded, 1, changed)
    code, claims = repeated(recorded, capsys, "--trust")  # whose settings these are now nobody knows
    assert code == 1
    assert [holds for name, holds in claims.items() if name.startswith(claim)] == [False]
