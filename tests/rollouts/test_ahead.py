"""Running ahead of training: how far, in which order, and that nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import prompted

from covey.config.algorithm import build_algorithm
from covey.config.sampling import Rollout
from covey.rewards.loading import load_rewards
from covey.rng import uniforms
from covey.rollouts.batch import BEGINNING, Position, RolloutBatch
from covey.rollouts.groups import OnProgress
from covey.rollouts.loop import Rollouts
from covey.runs.pending import PendingCompletions
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.types import Completion, Provenance, SamplingMask, Transcript


def long(stream: int) -> int:
    """How many tokens a stream gives: few, or many."""
    return int(3 + 60 * uniforms(stream, 1)[0] ** 4)


class Versioned:
    """Answers by prompt and stream, the longest last, each token of the version there is when it comes."""

    def __init__(self, answer: Callable[[np.ndarray, int], str], die_after: int | None = None) -> None:
        self.answer, self.version, self.bit_exact = answer, 0, False
        self.begun: list[int] = []
        self.left = die_after
        self.hold = threading.Event()
        self.hold.set()

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[SampledCompletion]:
        self.begun += [len(requests)]
        asked = [(long(x), r, s) for r, q in enumerate(requests) for s, x in enumerate(q.streams)]
        version = self.version
        for length, r, s in sorted(asked):
            self.hold.wait(10)
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            text = self.answer(requests[r].prompt, requests[r].streams[s])
            versions = np.array([version] * (length - 1) + [self.version])
            tokens = np.full(length, requests[r].prompt[0])
            drawn_by = Provenance(version, versions)
            done = Completion(tokens, np.zeros(length, np.float32), text, "stop", drawn_by)
            yield SampledCompletion(r, s, done)


def some_right(prompt: np.ndarray, stream: int) -> str:
    return str(prompt[0] - 1) if stream % 2 and prompt[0] % 3 else "wrong"


def rollouts(
    sampler: Versioned,
    staleness: int,
    store: PendingCompletions | None = None,
    steps: int | None = None,
    first_step: int = 0,
    position: Position = BEGINNING,
    progress: OnProgress = lambda *_: None,
    **more: object,
) -> Rollouts:
    algorithm = build_algorithm(more.pop("algorithm", "dapo"))
    rewards = load_rewards(more.pop("rewards", [{"exact_answer": {"rule": "whole"}}]), None)
    sizes = {"group_size": 4, "prompts_per_step": 3, "max_tokens": 99, "staleness": staleness, **more}
    return Rollouts(
        prompted(7),
        sampler,
        rewards,
        Rollout(**sizes),
        algorithm,
        0,
        steps,
        store,
        first_step=first_step,
        position=position,
        progress=progress,
    )


def trained(source: Rollouts, sampler: Versioned, count: int) -> list[RolloutBatch]:
    """Steps whose training takes no time."""
    found = []
    batches = source.batches()
    for batch in islice(batches, count):
        found.append(batch)
        sampler.version += 1
    batches.close()
    return found


def taken(batches: Sequence[RolloutBatch]) -> list[list[str]]:
    return [[g.problem.id for g in (*b.groups, *b.filtered)] for b in batches]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "remax"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_a_step_takes_the_groups_that_it_would_take_without(staleness: int, algorithm: str) -> None:
    alike = [Versioned(lambda p, _: str(p[0] - 1) if p[0] % 2 else "wrong") for _ in range(2)]
    now, later = (
        trained(rollouts(s, n, algorithm=algorithm, max_resampling_rounds=2), s, 6)
        for s, n in zip(alike, (0, staleness), strict=True)
    )
    assert taken(now) == taken(later)
    assert [b.position for b in now] == [b.position for b in later]
    assert [b.metrics["rollout/scored"] for b in now] == [b.metrics["rollout/scored"] for b in later]


@settings(max_examples=20, deadline=None)
@given(staleness=st.integers(1, 4), rounds=st.integers(0, 3), odd=st.integers(1, 5))
def test_no_token_is_older_than_the_bound(staleness: int, rounds: int, odd: int) -> None:
    sampler = Versioned(lambda p, x: str(p[0] - 1) if x % 2 and p[0] % odd == 0 else "wrong")
    for step, batch in enumerate(
        trained(rollouts(sampler, staleness, steps=8, max_resampling_rounds=rounds), sampler, 8)
    ):
        tokens = [c.provenance.versions for g in (*batch.groups, *batch.filtered) for c in g.completions]
        behind = step - np.concatenate(tokens)
        assert behind.max() <= staleness
        assert behind.min() >= 0
        if batch.groups:
            assert batch.metrics["staleness/max"] <= staleness


def test_sampling_runs_ahead_while_a_step_trains() -> None:
    sampler = Versioned(some_right)
    source = rollouts(sampler, 2, algorithm="grpo")
    batches = source.batches()
    next(batches)
    ends = time.monotonic() + 10
    while sum(sampler.begun) < 9 and time.monotonic() < ends:
        time.sleep(0.01)
    assert sum(sampler.begun) == 9, "three steps of three, and not one more"
    time.sleep(0.1)
    assert sum(sampler.begun) == 9
    batches.close()
    assert "sampling" not in {t.name for t in threading.enumerate()}


def test_nothing_is_begun_for_steps_that_will_not_be() -> None:
    sampler = Versioned(some_right)
    assert len(trained(rollouts(sampler, 4, steps=3, algorithm="grpo"), sampler, 3)) == 3
    assert sum(sampler.begun) == 9


def test_slow_rewards_of_several_steps_are_waited_for_at_once() -> None:
    awaited = 0
    most = 0

    async def asleep(completion: str) -> float:
        nonlocal awaited, most
        awaited += 1
        most = max(most, awaited)
        await asyncio.sleep(0.5)
        awaited -= 1
        return float(len(completion))

    at_once = []
    for staleness in (0, 1):
        most = 0
        sampler = Versioned(some_right)
        source = rollouts(sampler, staleness, algorithm="grpo", rewards=[asleep], steps=6)
        trained(source, sampler, 6)
        at_once.append(most)
    assert at_once[1] > at_once[0]


def test_a_mistake_in_the_sampling_thread_ends_the_run() -> None:
    sampler = Versioned(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(rollouts(sampler, 1), sampler, 1)


def test_a_stop_takes_effect_and_leaves_no_thread() -> None:
    sampler = Versioned(some_right)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(rollouts(sampler, 1, progress=stop).batches())
    assert "sampling" not in {t.name for t in threading.enumerate()}


def lengths(batches: Sequence[RolloutBatch]) -> list[list[int]]:
    return [sorted(len(c.tokens) for c in g.completions) for b in batches for g in (*b.groups, *b.filtered)]


@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.integers(1, 60), min_size=1, max_size=4), every=st.integers(1, 3))
def test_kills_lose_no_prompt_and_no_long_completion(kills: list[int], every: int) -> None:
    """The long ones end last, so that a kill finds them under way; they must come back as they were."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Versioned(some_right)
        expected = trained(rollouts(whole, 2, algorithm="grpo"), whole, 8)
        done: list[RolloutBatch] = []
        position, drawn = Position(), 0
        for kill in [*kills, None]:
            sampler = Versioned(some_right, kill)
            saved = len(done) - len(done) % every  # a checkpoint every so many steps
            done, position = done[:saved], done[saved - 1].position if saved else BEGINNING
            (Path(folder) / "checkpoints" / f"step_{saved:06d}").mkdir(parents=True, exist_ok=True)
            store = PendingCompletions(Path(folder))
            batches = rollouts(
                sampler, 2, store, first_step=saved, position=position, algorithm="grpo"
            ).batches()
            try:
                for batch in islice(batches, 8 - saved):
                    done.append(batch)
                    sampler.version += 1
            except KeyboardInterrupt:
                pass
            finally:
                batches.close()
            drawn += (kill or 0) - max(sampler.left or 0, 0)
        assert taken(done) == taken(expected)
        assert lengths(done) == lengths(expected)
        assert max(Counter(i for ids in taken(done) for i in ids).values()) <= -(-24 // 7)


def test_a_finished_completion_is_not_drawn_again(tmp_path: Path) -> None:
    first = Versioned(some_right, die_after=10)
    source = rollouts(first, 1, PendingCompletions(tmp_path), algorithm="grpo")
    with pytest.raises(KeyboardInterrupt):
        trained(source, first, 4)
    second = Versioned(some_right)
    second.version = 5
    batches = rollouts(second, 1, PendingCompletions(tmp_path), algorithm="grpo").batches()
    groups = [g for b in islice(batches, 2) for g in b.groups]
    batches.close()
    old = [c for g in groups for c in g.completions if c.provenance.version == 0]
    assert len(old) == 10
    assert sum(len(g.completions) for g in groups) == 24


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    request, params = Request(np.array([1, 2]), [7, 8]), SamplingParams(5, top_k=2)
    mask = SamplingMask(np.array([1, 2, 3, 4], np.int32), np.array([2, 4]))
    one = Completion(
        np.array([3, 4]),
        np.array([-0.1, -1 / 3], np.float32),
        "a\n\u2028b",
        "length",
        Provenance(2, np.array([2, 3])),
        np.array([True, False]),
        mask,
        Transcript(({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}), {"n": 1}, "x"),
    )
    keeps = PendingCompletions(tmp_path)
    keeps.add(12, request, params, SampledCompletion(0, 1, one))
    with (tmp_path / "pending" / "00000012.jsonl").open("ab") as file:
        file.write(b'\n0123456789abcdef {"torn')
    keeps.add(12, request, params, SampledCompletion(0, 0, one))
    again = PendingCompletions(tmp_path)
    for sample in (0, 1):
        found = again.find(12, request, sample, params)
        assert found is not None
        assert found.transcript == one.transcript
        for name in ("tokens", "logprobs", "token_versions", "drawn_mask"):
            assert (getattr(found, name) == getattr(one, name)).all()
            assert getattr(found, name).dtype == getattr(one, name).dtype
        assert (found.text, found.finish, found.provenance.version) == (one.text, one.finish, 2)
        assert (found.sampling_mask.ids == mask.ids).all()
    assert again.find(13, request, 0, params) is None
    assert again.find(12, request, 0, SamplingParams(6, top_k=2)) is None, "other parameters, another draw"
    assert again.find(12, Request(np.array([1, 3]), [7, 8]), 0, params) is None
    (tmp_path / "pending" / "00000012.jsonl").write_bytes(b"\xff\x00 nonsense\n")
    assert PendingCompletions(tmp_path).find(12, request, 0, params) is None


def test_what_a_checkpoint_is_past_is_forgotten(tmp_path: Path) -> None:
    sampler = Versioned(some_right)
    source = rollouts(sampler, 1, PendingCompletions(tmp_path), algorithm="grpo")
    batches = source.batches()
    for step in range(6):
        next(batches)
        sampler.version += 1
        if step == 3:
            (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    batches.close()
    tickets = sorted(int(p.stem) for p in (tmp_path / "pending").iterdir())
    assert tickets[0] == 12
    assert tickets[-1] >= 17
