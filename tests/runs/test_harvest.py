"""Examples out of a run's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config.schema import Keep
from covey.errors import DataError
from covey.runs.harvest import LoggedSample, mostly_truncated, pairs_of, write_pairs


def sample(reward: float, text: str, finish: str = "stop") -> LoggedSample:
    return LoggedSample(0, 0, "p", "Q", text, finish, reward, {})


def test_truncated_completions_make_no_pair_and_are_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [sample(1.0, "a", "length"), sample(0.0, "b", "length"), sample(1.0, "c")]
    assert pairs_of([cut], Keep(), {}) == []
    assert mostly_truncated([cut]).startswith("2 of 3 completions are truncated")
    assert mostly_truncated([[sample(1.0, "a"), sample(0.0, "b")]]) == ""
    monkeypatch.setattr("covey.runs.harvest.sampled_groups", lambda run: iter([cut]))
    with pytest.raises(DataError, match=r"2 of 3 completions are truncated.*rollout\.max_tokens"):
        write_pairs(tmp_path / "run", tmp_path / "pairs.jsonl", 0.0, 1)
