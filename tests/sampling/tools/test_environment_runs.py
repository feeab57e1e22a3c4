"""Rollouts and whole runs with environments: their processes, records and resumes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.insight.rescore import rescore
from covey.insight.show import show_group
from covey.models.policy import Policy, save_policy
from covey.rewards.loading import load_rewards
from covey.rng import key
from covey.runs.pending import PendingCompletions
from covey.runs.rollouts import read_rollouts
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.sampling.local import LocalSampler, Owner
from covey.sampling.tools import turns
from covey.sampling.tools.turns import TurnSampler
from covey.types import Completion
from covey_verify.calls.call import ToolCall
from tests import fakes
from tests.conftest import policy_of, random_prompts
from tests.sampling.tools.environments import FILE, ROW, completion, episode, said, toolbox
from tests.training.runs import check_resumes_alike, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model writes no call: here each turn that ends by itself with more than a token is one."""
    call = ToolCall("add", {"times": 2})
    monkeypatch.setattr(turns, "calls_in_text", lambda text: [call] if len(text) > 1 else [])


def requests() -> list[Request]:
    prompts = random_prompts(3, 4, 5)
    return [Request(p, [key(3, i, g) for g in range(4)], problem=ROW) for i, p in enumerate(prompts)]


PARAMS = SamplingParams(max_tokens=115, stop=tuple("0123456789aeiou"))


@pytest.mark.parametrize(("max_tokens", "answered"), [(400, (0, 1, 2, 2)), (60, (0, 1, 1, 1))])
def test_completions_end_with_what_their_environments_have_become(
    folder: Path, policy: Policy, max_tokens: int, answered: tuple[int, ...]
) -> None:
    # Sample n of a group calls n times, or as often as it may: a random model would call by luck.
    box = toolbox(folder, max_calls=2, result_tokens=8)
    call = '<tool_call>{"name": "add", "arguments": {"times": 2}}</tool_call>'

    def sampled() -> dict[Owner, Completion]:
        turns = Counter[int]()

        def turn(_: np.ndarray, stream: int) -> str:
            turns[stream] += 1
            return call if turns[stream] <= calls[stream] else "done"

        made = TurnSampler(fakes.ScriptedSampler(turn), policy, box)
        return {(r, s): c for r, s, c in made.sample(requests(), SamplingParams(max_tokens=max_tokens))}

    calls = {stream: n for request in requests() for n, stream in enumerate(request.streams)}
    found = sampled()
    assert sorted(found) == [(r, s) for r in range(3) for s in range(4)]
    for (_, sample), c in found.items():
        assert sum(t["role"] == "tool" for t in c.transcript.turns) == answered[sample]
        assert c.finish == ("length" if answered[sample] < min(sample, 2) else "stop")
        assert c.transcript.environment is not None
        # Two counts for each call, of that too whose answer had no room.
        assert c.transcript.environment["total"] == 5 + 2 * min(sample, 2)
    again = sampled()
    assert all(again[owner].transcript.environment == c.transcript.environment for owner, c in found.items())


@pytest.mark.usefixtures("calling")
def test_no_process_outlives_a_rollout(folder: Path, policy: Policy) -> None:
    box = toolbox(folder, max_calls=2, result_tokens=8)
    sampling = TurnSampler(LocalSampler(policy, 4), policy, box).sample(requests(), PARAMS)
    next(sampling)
    sampling.close()  # type: ignore[attr-defined]
    assert box.environments is not None
    ((server, hosted),) = box.environments.hosts
    assert not hosted and server.process is not None
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    for _ in range(100):
        if not (left := children.read_text().split()):
            break
        time.sleep(0.05)
    assert not left


def test_more_objects_than_a_server_holds_get_another(
    folder: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.sampling.tools.environments.HOSTED", 5)
    box = toolbox(folder)
    alive = [episode(box, seed=n) for n in range(12)]
    assert {said(box, own, "add") for own in alive} == {"6 from 5"}
    assert box.environments is not None
    assert [len(hosted) for _, hosted in box.environments.hosts] == [5, 5, 2]
    for own in alive:
        own.close()
    own = episode(box)
    assert said(box, own, "add") == "6 from 5"
    assert len(box.environments.hosts) == 3, "room is used again"
    own.close()


@pytest.mark.usefixtures("calling")
def test_a_run_resumes_to_the_bit_and_shows_what_became_of_its_games(folder: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "start": n}) + "\n" for n in range(6))
    for name in ("rows", "test"):
        (folder / f"{name}.jsonl").write_text(rows)
    save_policy(policy_of("qwen3"), folder / "model")
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {"task": None, "train": folder / "rows.jsonl", "test": folder / "test.jsonl"},
        "rewards": [{"environment_reward": {"verdict": True}}, f"{folder}/game.py:even"],
        "rollout": {
            "prompts_per_step": 3,
            "group_size": 4,
            "max_tokens": 60,
            "stop": tuple("0123456789aeiou"),
            "tools": {"environment": f"{folder}/game.py:Counter", "max_calls": 2},
        },
        "train": {"steps": 3, "save_every": 1, "lr": 1e-3},
    }
    check_resumes_alike(folder, **settings)
    for own in read_rollouts(folder / "whole", 1).rows:
        total = own["environment"]["total"]
        assert own["components"] == {"environment_reward": total / 10, "even": float(total % 2 == 0)}
    shown = show_group(folder / "whole", 1, 0)[1]
    assert sum(line.startswith("  = {") and '"total": ' in line for line in shown) == 4
    again = rescore(
        folder / "whole",
        load_rewards([{"environment_reward": {"verdict": True}}, f"{folder}/game.py:even"], folder),
        3,
    )
    assert all(np.array_equal(group.old, group.new) for group in again)


@pytest.mark.usefixtures("calling")
@pytest.mark.parametrize("chat", [False, True])
def test_completions_whose_reset_wrote_into_the_prompt_are_judged_again(folder: Path, chat: bool) -> None:
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "start": n}) + "\n" for n in range(4))
    (folder / "rows.jsonl").write_text(rows)
    save_policy(policy_of("qwen3"), folder / "model")
    tools = {"environment": f"{folder}/game.py:Speaks"}
    start(
        folder / "run",
        model=str(folder / "model"),
        data={"task": None, "train": folder / "rows.jsonl", "chat": chat},
        rewards=(by_the_prompt,),
        rollout={"max_tokens": 20, "tools": tools},
        train={"steps": 1},
    )
    again = rescore(folder / "run", load_rewards([by_the_prompt], folder), 1)
    assert len(again) == 4
    assert all(np.array_equal(group.old, group.new) and group.old.all() for group in again)


def by_the_prompt(completion: str, prompt: str) -> float:
    """By the number in what `reset` wrote."""
    return float(prompt.partition(" with ")[2].rstrip(".")) + len(str(completion)) % 2


def kept_again(run: Path, state: dict[str, object] | None) -> Iterator[Completion | None]:
    request, params = requests()[0], SamplingParams(4)
    PendingCompletions(run).add(0, request, params, SampledCompletion(0, 0, completion(state)))
    yield PendingCompletions(run).find(0, request, 0, params)


@pytest.mark.parametrize("state", [None, {"total": 3, "cells": [1, {"a": None}]}])
def test_what_was_sampled_ahead_keeps_its_state(tmp_path: Path, state: dict[str, object] | None) -> None:
    (again,) = kept_again(tmp_path, state)
    assert again is not None and again.transcript.environment == state
