"""Whose log-probs the ratio divides by, and how old a completion's policy was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes import ScriptedSampler
from tests.training.runs import interrupted, start, varied

from covey.config.algorithm import build_algorithm
from covey.errors import GuardStop
from covey.learner.learner import Learner
from covey.learner.old_logprobs import OldLogprobs, old_logprob_source
from covey.sampling.local import LocalSampler


@pytest.mark.parametrize(
    ("algorithm", "updates", "exact", "source"),
    [
        ("grpo", 1, True, OldLogprobs.CURRENT),
        ("grpo", 1, False, OldLogprobs.CURRENT),
        ("grpo", 2, True, OldLogprobs.RECORDED),
        ("grpo", 2, False, OldLogprobs.RECOMPUTED),
        ("kl_cov", 1, True, OldLogprobs.RECORDED),
        ("kl_cov", 1, False, OldLogprobs.RECOMPUTED),
        ("rloo", 1, False, OldLogprobs.RECOMPUTED),
        ({"name": "grpo", "old": "sampler"}, 1, True, OldLogprobs.SAMPLER),
        ({"name": "grpo", "old": "sampler"}, 4, False, OldLogprobs.SAMPLER),
    ],
)
def test_the_four_sources(algorithm: object, updates: int, exact: bool, source: OldLogprobs) -> None:
    sampler = ScriptedSampler(lambda *_: "")
    sampler.bit_exact = exact
    assert old_logprob_source(build_algorithm(algorithm), sampler, updates) is source


def test_a_sampler_of_another_make_is_not_taken_for_exact_because_the_policy_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[object] = []
    token_outputs = Learner.token_outputs

    def counted(*arguments: object) -> object:
        passes.append(arguments)
        return token_outputs(*arguments)

    monkeypatch.setattr(Learner, "token_outputs", counted)
    two = {"steps": 1, "updates_per_batch": 2}
    monkeypatch.setattr(LocalSampler, "bit_exact", True)
    start(tmp_path / "exact", rewards=(varied,), algorithm="dapo", train=two)
    assert not passes
    monkeypatch.setattr(LocalSampler, "bit_exact", False)
    start(tmp_path / "other", rewards=(varied,), algorithm="dapo", train=two)
    assert len(passes) == 1


def versions(folder: Path) -> list[set[int]]:
    """Of each step's completions."""
    logs = sorted((folder / "rollouts").glob("*.jsonl"))
    return [{json.loads(line)["version"] for line in log.read_text().splitlines()} for log in logs]


def test_every_completion_knows_how_many_updates_its_policy_had_seen(tmp_path: Path) -> None:
    settings = {"rewards": (varied,), "algorithm": "grpo"}
    train = {"steps": 4, "updates_per_batch": 2, "inner_epochs": 2, "save_every": 2}
    start(tmp_path / "whole", train=train, **settings)
    assert versions(tmp_path / "whole") == [{0}, {4}, {8}, {12}]
    interrupted(tmp_path / "cut", 60, train=train, **settings)
    start(tmp_path / "cut", train=train, **settings)
    assert versions(tmp_path / "cut") == [{0}, {4}, {8}, {12}]


def test_an_update_without_any_gradient_makes_no_new_policy(tmp_path: Path) -> None:
    with pytest.raises(GuardStop):
        start(tmp_path / "run", rewards=(lambda completion: 1.0,), algorithm="dr_grpo", train={"steps": 2})
    assert versions(tmp_path / "run") == [{0}, {0}]
