"""Judging while others are generated: placed by sample, in time, and honest about failures."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.fakes import completion

from covey.rewards.contract import Reward
from covey.rewards.groups import with_credit, with_label_noise
from covey.rewards.loading import load_rewards
from covey.rewards.reward_checks import count_failures, rehearse
from covey.rewards.scorer import Rewards, Scorer, ScoringStats
from covey.system.signals import StopSignal
from covey.types import Problem
from covey_verify.contract import reward
from covey_verify.errors import ConfigError, RewardError
from covey_verify.threads import Call
from covey_verify.types import Score

PROBLEM = Problem("p", "2+2=", {"answer": "4"})
TOKENS = np.array([1])


def judged(rewards: Rewards, *texts: str):
    return rewards.score_group(PROBLEM, TOKENS, [completion(t) for t in texts])


def of(*functions, **settings) -> Rewards:
    return Rewards([Reward(f.__name__, f) for f in functions], **settings)


def test_scores_keep_the_order_of_samples_whatever_ends_first() -> None:
    @reward(concurrent=True)
    def slower_for_early_ones(completion):
        time.sleep(0.02 * (4 - int(completion)))
        return float(completion)

    rewards = of(slower_for_early_ones)
    pending = Scorer(rewards).begin_group(PROBLEM, TOKENS, 4)
    for sample in (2, 0, 3, 1):
        pending.add(sample, completion(str(sample)))
    group = pending.result()
    assert group.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [c.text for c in group.completions] == ["0", "1", "2", "3"]


def test_judging_starts_before_the_group_is_whole() -> None:
    seen = threading.Event()

    def early(completion):
        seen.set()
        return 1.0

    def group_of_two(completions):
        assert len(completions) == 2
        return [1.0, 1.0]

    pending = Scorer(of(early, group_of_two)).begin_group(PROBLEM, TOKENS, 2)
    pending.add(0, completion("a"))
    assert seen.wait(2.0)
    pending.add(1, completion("b"))
    assert pending.result().rewards.tolist() == [2.0, 2.0]


def test_a_plain_function_never_meets_itself_and_a_concurrent_one_does() -> None:
    lock = threading.Lock()

    def most(count: list[int]) -> None:
        with lock:
            count[0] += 1
            count[1] = max(count)
        time.sleep(0.02)
        with lock:
            count[0] -= 1

    alone, together = [0, 0], [0, 0]

    def plain(completion):
        most(alone)
        return 1.0

    @reward(concurrent=True)
    def parallel(completion):
        most(together)
        return 1.0

    judged(of(plain, parallel), *"abcdef")
    assert alone[1] == 1
    assert together[1] >= 2


def test_one_that_hangs_costs_its_own_samples_only(capsys) -> None:
    def hangs(completion):
        if completion == "b":
            time.sleep(5)
        return 1.0

    group = judged(of(hangs, timeout=0.2), "a", "b", "c")
    assert [s.status for s in group.components["hangs"].scores] == ["ok", "timeout", "ok"]
    assert group.rewards[1] == 0.0
    assert "no answer within 0.2 s" in group.components["hangs"].scores[1].detail
    assert "reward hangs on problem p failed" in capsys.readouterr().err


def test_a_suspended_process_has_not_hung() -> None:
    task = Call[None](limit=10.0)
    assert not task.late()
    task.started = time.monotonic() - 20
    assert task.late()
    with StopSignal().listening():
        os.kill(os.getpid(), signal.SIGCONT)  # what a process hears when it goes on
        assert not task.late()


@pytest.mark.parametrize(("slept", "limit"), [(7.0, 1.0), (0.2, 0.1)], ids=["stopped", "late"])
def test_a_thread_whose_wait_lasted_too_long_knows_that_all_stood_still(
    monkeypatch, slept: float, limit: float
) -> None:
    """It may wake before the main thread, which alone hears signals."""
    now, waits = [100.0], iter([slept, None])
    task = Call[str](limit)
    task.started = now[0]

    def result(timeout: float) -> str:
        if (passed := next(waits)) is None:
            return "answer"
        now[0] += passed
        raise TimeoutError

    monkeypatch.setattr("covey_verify.threads._continued", 0.0)
    monkeypatch.setattr(task.future, "result", result)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert task.result() == "answer"
    assert task.future.cancelled() == (slept < 1)


def test_one_that_raises_is_shown_once_and_left_out(capsys) -> None:
    def raises(completion):
        if completion == "b":
            raise KeyError("gold")
        return 1.0

    rewards = of(raises)
    for _ in range(2):
        group = judged(rewards, "a", "b")
        score = group.components["raises"].scores[1]
        assert (score.value, score.status) == (None, "infra_error")
        assert re.fullmatch(r"KeyError: 'gold' \(test_scorer.py:\d+: raise KeyError.*\)", score.detail)
    assert capsys.readouterr().err.count("failed:") == 1


def test_a_run_whose_judging_keeps_failing_is_stopped(capsys) -> None:
    def flaky(completion):
        if completion == "bad":
            raise OSError("judge is down")
        return 1.0

    rewards, before = of(flaky), []
    for step in range(3):  # a third, less than 40 %
        before = count_failures(before, [judged(rewards, "good", "good", "bad")], max_infra=0.4, window=3)
        assert before == [(1, 3)] * (step + 1)
    with pytest.raises(RewardError, match="judge is down"):
        count_failures(before, [judged(rewards, "bad", "bad")], max_infra=0.4, window=3)
    assert count_failures(before, [judged(rewards, "good")], 0.4, window=3) == [(1, 3), (1, 3), (0, 1)]


def fails_on_b(completion):
    if completion.startswith("b"):
        raise OSError("judge is down")
    return 1.0


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, True),
        ({"weight": 0.3}, True),
        ({"weight": 0.0}, False),  # it only watches
        ({"gated_by": "right:correct"}, False),  # b is incorrect, so the judge would not count
        ({"gated_by": "right:incorrect"}, True),
    ],
)
def test_a_completion_of_which_one_reward_failed_is_left_out_whole(settings: dict, left_out: bool) -> None:
    def right(completion):
        return float(completion == "a")

    rewards = Rewards([Reward("right", right, verdict=True), Reward("fails_on_b", fails_on_b, **settings)])
    group = judged(rewards, "a", "b", "c")
    assert group.scorable.tolist() == [True, not left_out, True]
    assert group.correct.tolist() == [True, False, False]
    assert with_credit(group, "step").scorable.tolist() == group.scorable.tolist()
    alike = with_credit(judged(rewards, "c", "b", "c"), "component")
    assert alike.dead, "what was left out is not compared either"


def test_a_completion_that_only_a_reward_of_weight_0_judges_is_left_out() -> None:
    def preference(completion):
        return None if completion == "b" else -1.0

    def right(completion):
        return float(completion == "b")

    measured = Reward("right", right, weight=0.0, verdict=True)
    group = judged(Rewards([measured, Reward("preference", preference)]), "a", "b", "c")
    # A 0 of b, which nothing paid, would be the best reward of the group.
    np.testing.assert_array_equal(group.rewards, [-1.0, np.nan, -1.0])
    assert group.correct.tolist() == [False, True, False]
    assert np.isnan(with_credit(group, "step").rewards).tolist() == [False, True, False]
    alone = judged(Rewards([measured]), "a", "b")
    assert alone.rewards.tolist() == [0.0, 0.0]


def test_a_reward_that_is_gated_by_one_that_failed_is_unknown(capsys) -> None:
    def right(completion):
        return 1.0

    rewards = Rewards(
        [Reward("fails_on_b", fails_on_b, weight=0.0), Reward("right", right, gated_by="fails_on_b")]
    )
    assert judged(rewards, "a", "b").scorable.tolist() == [True, False]


def test_a_reward_that_keeps_failing_does_not_hide_behind_others(capsys) -> None:
    def right(completion):
        return 1.0

    rewards = Rewards([*(Reward(f"r{n}", right) for n in range(5)), Reward("fails_on_b", fails_on_b)])
    before = []
    for _ in range(4):
        before = count_failures(before, [judged(rewards, "a", "a", "b")], max_infra=0.2)
    assert before == [(1, 3)] * 4
    with pytest.raises(RewardError, match="5 of 15 completions of the last 5 steps could not be judged"):
        count_failures(before, [judged(rewards, "a", "a", "b")], max_infra=0.2)


def test_a_step_in_which_nothing_could_be_judged_stops_at_once(capsys) -> None:
    def down(completion):
        raise OSError("judge is down")

    rewards = of(down)
    with pytest.raises(RewardError, match="could not be judged"):
        count_failures([], [judged(rewards, "a", "b")], max_infra=0.2)


def test_two_scorings_at_once_count_and_log_each_for_itself() -> None:
    def logs(completion, log_metric, trainer_state):
        log_metric("step", trainer_state.global_step)
        return 1.0

    rewards = of(logs)
    scorers = [Scorer(rewards, step) for step in (3, 4)]
    groups = [scorer.begin_group(PROBLEM, TOKENS, 2) for scorer in scorers]
    for sample in range(2):
        for group in groups[: 2 - sample]:
            group.add(sample, completion("a"))
    groups[0].result()
    groups[1].add(1, completion("a"))
    groups[1].result()
    for scorer in scorers:
        stats = scorer.stats
        assert stats.waited > 0
        step = float(scorer.context.step)
        assert stats == ScoringStats(2, 2, stats.waited, {"step": [step, step]})


def test_a_rehearsal_finds_a_broken_function_before_training() -> None:
    def broken(completions):
        return [1.0]

    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        rehearse(PROBLEM, of(broken))


ISOLATED = """
import os, time
from covey import Score, reward

@reward(isolate="process", timeout=1.0)
def risky(completion, answer):
    if completion == "hang": time.sleep(60)
    if completion == "die": os._exit(1)
    if completion == "hog": held = bytearray(1 << 36)
    if completion == "raise": raise ValueError("no")
    if completion == "leave": raise SystemExit
    if answer == "die for all": os._exit(1)
    if completion == "rich": return Score(0.5, "ambiguous", "rich", {"length": 4.0})
    return float(completion == answer)
"""


def test_an_isolated_function_can_hang_die_and_overflow(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(ISOLATED)
    rewards = load_rewards(["mine.py:risky"], tmp_path)
    group = judged(rewards, "4", "hang", "5", "die", "hog", "raise", "rich", "leave")
    found = [(s.value, s.status) for s in group.components["risky"].scores]
    assert found[:3] == [(1.0, "ok"), (0.0, "timeout"), (0.0, "ok")]
    assert [found[n] for n in (3, 4, 7)] == [(0.0, "crashed")] * 3, "what its text does is a completion's own"
    assert found[5] == (None, "infra_error")
    assert group.components["risky"].scores[6] == Score(0.5, "ambiguous", "rich", {"length": 4.0})
    assert "(mine.py:10: " in group.components["risky"].scores[5].detail


def test_an_isolated_function_that_dies_of_the_row_is_nobodys_zero(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(ISOLATED)
    rewards = load_rewards(["mine.py:risky"], tmp_path)
    row = Problem("p", "?", {**PROBLEM.columns, "answer": "die for all"})
    group = rewards.score_group(row, np.array([1]), [completion("a"), completion("die")])
    assert [s.value for s in group.components["risky"].scores] == [None, None]


def test_of_a_group_only_the_text_that_ends_the_process_is_zero(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom covey import reward\n@reward(isolate='process')\ndef together(completions):\n"
        "    if 'die' in completions: os._exit(1)\n    return [float(len(c)) for c in completions]\n"
    )
    group = judged(load_rewards(["mine.py:together"], tmp_path), "a", "die", "ccc")
    assert [(s.value, s.status) for s in group.components["together"].scores] == [
        (1.0, "ok"),
        (0.0, "crashed"),
        (3.0, "ok"),
    ]


def test_an_isolated_function_that_dies_of_nothing_is_the_users(tmp_path: Path) -> None:
    """Paid with 0, all completions would tie, and nobody would be told why."""
    (tmp_path / "mine.py").write_text(ISOLATED.replace('if completion == "die"', "if True"))
    group = judged(load_rewards(["mine.py:risky"], tmp_path), "4")
    assert [(s.value, s.status) for s in group.components["risky"].scores] == [(None, "infra_error")]


RETURNS = """
from __future__ import annotations
from dataclasses import dataclass
from functools import partial, wraps
import numpy as np
from covey import Score, StepRewards, reward

@dataclass
class Verdict:
    value: float

def lenient(completion): return 1.0

@wraps(lenient)
def strict(completion): return Verdict(0.0).value

paid = reward(isolate={place!r})(partial(lambda completion, much: much, much=0.5))
strict = reward(isolate={place!r})(strict)

@reward(isolate={place!r})
def steps(completion): return StepRewards([1.0, -0.5], [0, 2])

@reward(isolate={place!r})
def numbers(completion, log_metric, trainer_state):
    log_metric("step", trainer_state.global_step)
    return Score(np.float32(0.5), metrics={{"n": np.float32(2)}})

@reward(isolate={place!r})
def pair(completion): return 0.5, "why"

@reward(isolate={place!r}, timeout=0.5)
def slow(completion_ids):
    while True: pass
"""


@pytest.mark.parametrize("place", ["worker", "process", "sandbox", "inline"])
def test_a_reward_means_the_same_wherever_it_is_judged(tmp_path: Path, place: str) -> None:
    (tmp_path / "mine.py").write_text(RETURNS.format(place=place))
    names = [f"mine.py:{name}" for name in ("strict", "paid", "steps", "numbers")]
    rewards = load_rewards([{name: {"verdict": i == 0}} for i, name in enumerate(names)], tmp_path)
    found = {name: own.scores[0] for name, own in judged(rewards, "a").components.items()}
    assert [found[name].value for name in ("strict", "paid", "steps", "numbers")] == [0.0, 0.5, 0.5, 0.5]
    assert found["steps"].steps == ((0, 1, 1.0), (1, 3, -0.5))
    assert found["numbers"].metrics == {"n": 2.0}
    with pytest.raises(RewardError, match="returned tuple"):
        judged(load_rewards(["mine.py:pair"], tmp_path), "a")


def test_a_function_that_hangs_whatever_the_texts_are_is_nobodys_zero(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RETURNS.format(place="process"))
    scores = judged(load_rewards(["mine.py:slow"], tmp_path), "a", "b").components["slow"].scores
    assert [(s.value, s.status) for s in scores] == [(None, "infra_error")] * 2


def test_of_a_group_only_the_text_that_hangs_is_zero(tmp_path: Path) -> None:
    """Paid with 0, the others would lose what they had earned because of a sibling."""
    (tmp_path / "mine.py").write_text(
        "from covey import reward\n@reward(isolate='process', timeout=1.0)\ndef together(completions):\n"
        "    while 'hang' in completions: pass\n    return [float(len(c)) for c in completions]\n"
    )
    group = judged(load_rewards(["mine.py:together"], tmp_path), "a", "hang", "ccc")
    assert [(s.value, s.status) for s in group.components["together"].scores] == [
        (1.0, "ok"),
        (0.0, "timeout"),
        (3.0, "ok"),
    ]


@pytest.mark.parametrize("how", ["plain", "async"])
def test_inline_too_the_text_that_hangs_or_raises_is_to_blame(how: str) -> None:
    """The call cannot be ended, but a second look without the text tells whose fault it is."""
    over = threading.Event()

    def plain(completion: str) -> float:
        if completion == "hang":
            over.wait()
        return float(eval(completion))

    async def later(completion: str) -> float:
        if completion == "hang":
            await asyncio.sleep(600)
        return float(eval(completion))

    def stuck(completion: str) -> float:  # whatever the text is
        over.wait()
        return 1.0

    try:
        rewards = Rewards([Reward("mine", plain if how == "plain" else later)], timeout=0.3)
        scores = judged(rewards, "2", "hang", "1/0").components["mine"].scores
        assert [(s.value, s.status) for s in scores] == [(2.0, "ok"), (0.0, "timeout"), (0.0, "crashed")]
        scores = judged(Rewards([Reward("stuck", stuck)], timeout=0.3), "a").components["stuck"].scores
        assert [(s.value, s.status) for s in scores] == [(None, "infra_error")]
    finally:
        over.set()


BOXED = """
import importlib, os, socket, sys
from pathlib import Path
import covey
from covey import Score, reward

def can(call):
    try:
        call()
    except OSError:
        return 0.0
    return 1.0

def imports(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "(sandbox.packages)" in str(error), error
        return 0.0
    return 1.0

site = next(folder for folder in sys.path if folder.endswith("site-packages"))

@reward(isolate="sandbox")
def runs(completion, answer):
    here = Path(__file__).parent
    found = {
        "reads": can((here / "key.txt").read_text),
        "writes": can((here / "new.txt").touch),
        "connects": can(lambda: socket.socket().connect(("127.0.0.1", 1))),
        "starts": can(lambda: os.posix_spawn("/bin/true", ["true"], {})),
        "keys": float("COVEY_TEST_KEY" in os.environ),
        "covey's source": can(Path(covey.__file__).read_text),
        "others' source": can(Path(site, "jinja2", "__init__.py").read_text),
        "others": imports("jinja2"),
        "the rest of covey": can(lambda: importlib.import_module("covey.training.run")),
        "its own": 1 - imports("numpy") * imports("sympy") * imports("statistics") * imports("beside"),
    }
    return Score(float(eval(completion) == int(answer)), metrics=found)

@reward(isolate="sandbox")
async def waits(completion): return 1.0
"""


def test_a_users_function_in_the_sandbox_reaches_nothing(tmp_path: Path, monkeypatch) -> None:
    """It may run what a model wrote, which under `process` has the user's files and network."""
    monkeypatch.setenv("COVEY_TEST_KEY", "secret")
    (tmp_path / "mine.py").write_text(BOXED)
    (tmp_path / "beside.py").touch()
    (tmp_path / "key.txt").write_text("secret")
    rewards = load_rewards(["mine.py:runs"], tmp_path)
    scores = judged(rewards, "2+2", "5", "os._exit(0)").components["runs"].scores
    assert [(s.value, s.status) for s in scores] == [(1.0, "ok"), (0.0, "ok"), (0.0, "crashed")]
    assert set(scores[0].metrics.values()) == {0.0}, scores[0].metrics
    assert rewards.sandbox and not (tmp_path / "new.txt").exists()


def test_what_no_sandbox_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BOXED)
    with pytest.raises(ConfigError, match=r"waits: .* is not for an async function"):
        load_rewards(["mine.py:waits"], tmp_path)
    with pytest.raises(ConfigError, match="needs a function from a file"):
        load_rewards([reward(isolate="sandbox")(lambda completion: 1.0)], tmp_path)


def test_an_unreliable_judge_is_wrong_about_its_share_of_verdicts_and_steps() -> None:
    def process(completion):
        return Score({"half": 0.75, "far": -3.0, "lost": None}[completion], steps=((0, 1, 1.0), (1, 3, -0.5)))

    rewards = of(process)
    streams = range(400)
    half = with_label_noise(judged(rewards, *["half"] * 400), rewards, 0.3, streams)
    steps = np.array([s.values for s in half.components["process"].steps])
    turned = np.stack([half.rewards == 0.25, steps[:, 0] == -1.0, steps[:, 1] == 0.5])
    assert set(half.rewards) == {0.75, 0.25} and set(steps.flat) == {1.0, -1.0, -0.5, 0.5}
    assert (abs(turned.mean(1) - 0.3) < 0.1).all()
    assert (abs(np.corrcoef(turned)) < 0.2).sum() == 6, "each has a draw of its own"
    parts = [s.metrics["flipped"] for s in half.components["process"].scores]
    np.testing.assert_allclose(parts, turned.mean(0))
    alone = with_label_noise(judged(rewards, "half"), rewards, 0.3, streams[7:8])
    assert alone.components["process"].scores[0] == half.components["process"].scores[7]
    far = with_label_noise(judged(rewards, *["far"] * 400), rewards, 0.3, streams)
    assert set(far.rewards) == {-3.0}
    lost = with_label_noise(judged(rewards, "lost", "half"), rewards, 0.3, streams[:2])
    assert lost.components["process"].scores[0].value is None


def test_flipped_labels_open_and_shut_the_gates_of_others() -> None:
    def right(completion):
        return float(completion == "4")

    def praise(completion):
        return 2.0  # outside 0..1, so that it is left alone

    rewards = Rewards([Reward("right", right), Reward("praise", praise, gated_by="right:correct")])
    group = with_label_noise(judged(rewards, *["4"] * 50), rewards, 0.5, range(50))
    assert set(group.rewards) == {0.0, 3.0}
