"""Examples out of a run's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config.schema import Keep
from covey.runs.examples import (
    LoggedSample,
    correct_examples,
    mostly_truncated,
    preference_pairs,
    write_pairs,
)
from covey_verify.errors import DataError


def sample(reward: float, text: str, finish: str = "stop") -> LoggedSample:
    return LoggedSample(0, 0, "p", "Q", text, finish, reward, {})


def test_truncated_completions_make_no_pair_and_are_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [sample(1.0, "a", "length"), sample(0.0, "b", "length"), sample(1.0, "c")]
    assert preference_pairs([cut], Keep(), {}) == []
    assert mostly_truncated([cut]).startswith("2 of 3 completions are truncated")
    assert mostly_truncated([[sample(1.0, "a"), sample(0.0, "b")]]) == ""
    monkeypatch.setattr("covey.runs.examples.sampled_groups", lambda run: iter([cut]))
    with pytest.raises(DataError, match=r"2 of 3 completions are truncated.*rollout\.max_tokens"):
        write_pairs(tmp_path / "run", tmp_path / "pairs.jsonl", 0.0, 1)


def test_equal_rewards_make_no_pair_and_the_margin_itself_is_not_beyond_it() -> None:
    equal = [sample(1.0, "a"), sample(1.0, "b")]
    assert preference_pairs([equal], Keep(margin=0.0), {}) == []
    assert len(preference_pairs([[sample(1.0, "a"), sample(0.5, "b")]], Keep(margin=0.0), {})) == 1
    assert preference_pairs([[sample(1.0, "a"), sample(0.5, "b")]], Keep(margin=0.5), {}) == []


def test_a_reward_that_was_not_given_passes_no_threshold() -> None:
    def correct(text: str, components: dict[str, float | None]) -> LoggedSample:
        return LoggedSample(0, 0, "p", "Q", text, "stop", 1.0, {"ok": 1.0, **components})

    group = [correct("given", {"style": 0.0}), correct("unknown", {"style": None}), correct("absent", {})]
    for least in (-1.0, 0.0):
        kept = correct_examples([group], "ok", Keep(least={"style": least}, per_problem=9), {})
        assert [row["completion"] for row in kept] == ["given"]
    assert correct_examples([[correct("a", {"ok": None})]], "ok", Keep(), {}) == []
