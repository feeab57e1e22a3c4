"""The shadow trainer repeats runs whose tokens another version drew, a server sent, or a tool inserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.load import load_config
from covey.models.load import load_policy
from covey.proof.agreement import Agreement
from covey.proof.check_run import check_run
from covey.runs.rollouts import read_rollouts
from covey.sampling.base import SampledCompletion
from covey.sampling.local import LocalSampler
from covey.sampling.tools import turns
from covey.system.console import RunConsole
from covey_verify.calls.call import ToolCall
from tests.cluster.serving.served import serving
from tests.proof.cases import Model, mixed, trained_and_repeated
from tests.training.runs import metrics_of

STEPS = 4
TRAIN = {"lr": 1e-3, "updates_per_batch": 2, "tokens_per_micro_batch": 40}
ROLLOUT = {"prompts_per_step": 3, "group_size": 3, "max_tokens": 12}
CALL = ToolCall("calculate", {"expression": "6*7"})


def repeated(output: Path, model: Model, **settings: Any) -> list[Agreement]:
    """Train and repeat; every difference is one of rounding."""
    settings = {"algorithm": {"name": "dapo", "filter": None}, "train": TRAIN, **settings}
    steps = trained_and_repeated(output, model, STEPS, **settings)
    assert len(steps) == STEPS
    for step in steps:
        assert step.logprobs is not None and step.advantages is not None
        assert step.logprobs < 1e-4
        assert step.advantages < 1e-5
        assert step.gradient < 1e-4
    assert steps[-1].course is not None
    assert steps[-1].course < 1e-3
    assert all(claim.holds for claim in check_run(output, STEPS, RunConsole(quiet=True)))
    return steps


@pytest.mark.parametrize("staleness", [1, 2])
def test_tokens_of_earlier_versions_are_those_of_their_weights(
    tmp_path: Path, model: Model, staleness: int
) -> None:
    run = tmp_path / "run"
    repeated(run, model, rollout={**ROLLOUT, "staleness": staleness})
    assert all(m["optimizer/grad_norm"] > 0 for m in metrics_of(run))
    behind = [2 * n - read_rollouts(run, n + 1).arrays["versions"].min() for n in range(STEPS)]
    assert max(behind) > 0, "some token was drawn before the step's weights were there"


def test_a_version_that_did_not_draw_its_tokens_is_found(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = LocalSampler.sample

    def newer(self: LocalSampler, *arguments: Any) -> Iterator[SampledCompletion]:
        for sampled in sample(self, *arguments):
            completion = sampled.completion
            known = completion.provenance
            later = replace(known, versions=None if known.versions is None else known.versions + 2)
            yield sampled._replace(completion=replace(completion, provenance=later))

    monkeypatch.setattr(LocalSampler, "sample", newer)
    settings = {"algorithm": {"name": "dapo", "filter": None}, "train": TRAIN}
    steps = trained_and_repeated(
        tmp_path / "run", model, STEPS, rollout={**ROLLOUT, "staleness": 1}, **settings
    )
    assert max(step.logprobs or 0.0 for step in steps) > 0.01
    assert all(step.gradient < 1e-4 for step in steps), "nothing else is wrong"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_a_server_is_repeated(tmp_path: Path, model: Model, staleness: int) -> None:
    policy = load_policy(load_config(values={"model": str(model.folder)}))
    with serving(policy, tmp_path / "run" / "sync") as url:
        rollout = {**ROLLOUT, "staleness": staleness, "sampler": {"url": [url]}}
        repeated(tmp_path / "run", model, rollout=rollout)


@pytest.mark.parametrize("rollout", [{}, {"top_k": 40}, {"staleness": 1}])
def test_a_run_with_tools_is_repeated(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any]
) -> None:
    """An untrained model writes no call: here each turn that ends by itself is one."""
    monkeypatch.setattr(turns, "calls_in_text", lambda text: [CALL] if text else [])
    monkeypatch.setattr(turns, "answer_tokens", lambda *_: [40, 41, 42])
    tools = {"functions": ["calculate"], "max_calls": 3}
    sampled = {**ROLLOUT, "max_tokens": 40, "tools": tools, **rollout}
    repeated(tmp_path / "run", model, rollout=sampled, rewards=(mixed,))
    log = read_rollouts(tmp_path / "run", 1)
    ends = log.arrays["ends"].tolist()
    answered = [
        (np.diff(log.arrays["sampled"][a:b].astype(int)) < 0).sum()
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    assert max(answered) >= 2, "some completion was answered several times"
