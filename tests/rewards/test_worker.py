"""Users' functions are judged where they can be killed, and say the same there as in the trainer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fakes import completion

from covey.rewards.contract import Reward
from covey.rewards.loading import load_rewards
from covey.rewards.reward_checks import ask_canaries, count_failures, rehearse
from covey.rewards.scorer import Rewards, Scorer
from covey.types import Problem
from covey_verify.errors import RewardError
from covey_verify.types import Score

COLUMNS = {"answer": "4", "parts": [1, (2.5, b"x")], "odd": float("inf"), "empty": None}
PROBLEM = Problem("p", "2+2=", COLUMNS)
USERS = """
import asyncio, os, random, re, threading, time
from covey import Score, StepRewards, reward

seen = []

def pattern(completion):
    return float(bool(re.match(r"(a+)+$", completion)))

def leaves(completion):
    if completion == "exit": os._exit(0)
    if completion == "segfault": os.kill(os.getpid(), 11)
    if completion == "quit": raise SystemExit(0)
    if completion == "interrupt": raise KeyboardInterrupt
    return 1.0

def forks(completion):
    return 1.0 if os.fork() else 0.5

def counts(completion):
    seen.append(completion)
    return float(len(seen))

def everything(prompts, completions, completion_ids, answer, log_metric, trainer_state, log_extra, **columns):
    log_metric("seen", len(completions))
    log_extra("column", ["a"])
    assert columns["parts"][0] == [1, (2.5, b"x")] and columns["odd"][0] == float("inf")
    assert columns["empty"] == [None] * len(prompts) and set(columns) == {"parts", "odd", "empty"}
    return [0.1 * len(c) + len(i) + trainer_state.global_step for c, i in zip(completions, completion_ids)]

def rich(completion, *, bonus=0.5):
    if completion == "steps": return StepRewards([0.1, 1 / 3], [0, 2])
    if completion == "none": return None
    if completion == "verl": return {"score": True}
    return Score(bonus, "ambiguous", "it", {"length": 1 / 3}, ((0, 1, 0.7),), "why")

async def later(completion):
    seen.append(completion)
    while len(seen) < 3: await asyncio.sleep(0.001)
    return float(completion)

async def never(completion):
    if completion == "hang": await asyncio.sleep(60)
    return 1.0

@reward(concurrent=True)
def together(completion):
    seen.append(completion)
    began = time.monotonic()  # asked again, the one that exits may be alone
    while len(seen) < 2 and time.monotonic() < began + 2: time.sleep(0.001)
    if completion == "exit": os._exit(3)
    return 1.0

def own_loop(completion):
    return asyncio.run(later("1")) if seen.extend("ab") is None else 0.0

def down(completion):
    time.sleep(60)

def flickers(completion):
    if not os.path.exists(__file__ + ".asked"):
        open(__file__ + ".asked", "w").close()
        time.sleep(60)
    return 1.0

def helps(number):
    return number["a"]

def evaluates(completion):
    return float(eval(completion) == 4)

def evaluates_all(completions):
    return [float(eval(c) == 4) for c in completions]

def of_ids(completions, completion_ids):
    if any(len(ids) == 2 for ids in completion_ids): os._exit(3)
    return [1.0] * len(completions)

def raises(completion, answer):
    gold = {"right": answer}
    return gold["wrong"]

def spoils(completion, parts, prompt):
    parts.clear()
    return 1.0

def sees(completion, parts):
    return float(len(parts))

def where(completion):
    return float(os.getpid())

def text(completion):
    return "good"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(USERS)
    return tmp_path


def load(project: Path, *names: str, timeout: float = 60.0) -> Rewards:
    rewards = load_rewards([f"users.py:{n}" for n in names], project)
    return replace(rewards, timeout=timeout)


def judged(rewards: Rewards, *texts: str, strict: bool = False):
    return rewards.score_group(PROBLEM, np.array([1]), [completion(t) for t in texts], strict)


def test_a_pattern_that_holds_the_interpreter_ends_at_its_timeout(project: Path, capsys) -> None:
    rewards = load(project, "pattern", timeout=1.0)
    begun = time.monotonic()
    scores = judged(rewards, "aa", "a" * 40 + "b", "aaa").components["pattern"].scores
    assert time.monotonic() - begun < 30, "such a match takes days"
    assert [(s.value, s.status) for s in scores] == [(1.0, "ok"), (0.0, "timeout"), (1.0, "ok")]
    assert "no answer within 1 s" in scores[1].detail


def test_one_that_ends_its_process_costs_its_own_sample(project: Path, capsys) -> None:
    rewards = load(project, "leaves")
    group = judged(rewards, "a", "exit", "b", "segfault", "quit", "interrupt", "c")
    scores = group.components["leaves"].scores
    assert [s.value for s in scores] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert {scores[i].status for i in (1, 3, 4, 5)} == {"crashed"}
    assert scores[1].detail == "it ended its own process (exit code 0)"
    assert capsys.readouterr().err.count("reward leaves on problem p failed") == 1
    assert scores[3].detail == "it ended its own process (killed by SIGSEGV (Segmentation fault))"
    assert scores[4].detail.startswith("SystemExit: 0") and scores[5].detail.startswith("KeyboardInterrupt")
    count_failures([], [judged(rewards, "exit", "exit")], max_infra=0.2)
    with pytest.raises(RewardError, match=r"leaves on problem p: it ended its own process"):
        judged(rewards, "exit", strict=True)


def test_a_child_of_a_function_that_forks_does_not_reply(project: Path) -> None:
    """The child returned 0.5 into the same channel, and the second reply was taken for the next call's."""
    assert judged(load(project, "forks"), *"abc").rewards.tolist() == [1.0, 1.0, 1.0]


def test_importing_a_file_leaves_torch_as_it_was(tmp_path: Path) -> None:
    """With another default dtype, the trainer's own tensors had another size than its operations write."""
    changes = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\n"
    changes += "torch.set_num_threads(7)\ntorch.set_default_device('meta')\n"
    (tmp_path / "loud.py").write_text(f"{changes}def loud(completion):\n    return 1.0\n")
    threads = torch.get_num_threads()
    load_rewards(["loud.py:loud"], tmp_path)
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert (torch.get_num_threads(), torch.get_default_device().type) == (threads, "cpu")


def test_its_state_is_kept_between_calls(project: Path) -> None:
    assert judged(load(project, "counts"), *"abc").rewards.tolist() == [1.0, 2.0, 3.0]


def test_it_says_what_it_would_say_in_the_trainer(project: Path) -> None:
    names = ("everything", "rich")
    worker = load(project, *names)
    inline = Rewards([Reward(r.name, r.function) for r in worker])
    assert (worker.inline, inline.inline) == ([], list(names))
    groups, logged = [], []
    for rewards in (worker, inline):
        scorer = Scorer(rewards, step=3)
        group = scorer.begin_group(PROBLEM, np.array([1]), 4)
        for sample, text in enumerate(("steps", "none", "verl", "else")):
            group.add(sample, completion(text))
        groups.append(group.result())
        logged.append(scorer.stats.logged)
    ours, theirs = groups
    for name, component in ours.components.items():
        assert component.scores == theirs.components[name].scores
    rich = ours.components["rich"].scores[3]
    assert ours.rewards.tobytes() == theirs.rewards.tobytes()
    assert rich == Score(0.5, "ambiguous", "it", {"length": 1 / 3}, ((0, 1, 0.7),), "why")
    assert logged == [{"seen": [4.0]}] * 2


def test_async_and_concurrent_functions_run_together_there(project: Path) -> None:
    assert judged(load(project, "later"), "1", "2", "3").rewards.tolist() == [1.0, 2.0, 3.0]
    assert judged(load(project, "together"), "a", "b").rewards.tolist() == [1.0, 1.0]
    assert judged(load(project, "own_loop"), "a").rewards.tolist() == [1.0]


def test_an_async_function_that_hangs_costs_its_own_call_only(project: Path, capsys) -> None:
    scores = judged(load(project, "never", timeout=0.5), "a", "hang", "b").components["never"].scores
    assert [(s.value, s.status) for s in scores] == [(1.0, "ok"), (0.0, "timeout"), (1.0, "ok")]


def test_only_texts_that_are_to_blame_get_0(project: Path, capsys) -> None:
    """A function that hangs or ends whatever the text, or only once, is not the completion's fault."""
    always = judged(load(project, "down", timeout=0.5), "a", "b")
    assert [s.status for s in always.components["down"].scores] == ["infra_error"] * 2
    with pytest.raises(RewardError, match=r"no answer within 0\.5 s"):
        count_failures([], [always], max_infra=0.2)
    once = judged(load(project, "flickers", timeout=2.0), "a")
    assert once.components["flickers"].scores[0].value == 1.0
    assert "no answer within 2 s; it was called again, and answered" in capsys.readouterr().err
    texts = judged(load(project, "evaluates"), "2+2", "1/0", "2 +", "helps(3)").components["evaluates"].scores
    assert [(s.value, s.status) for s in texts] == [
        (1.0, "ok"),
        (0.0, "crashed"),
        (0.0, "crashed"),
        (0.0, "crashed"),
    ]
    of_group = judged(load(project, "evaluates_all"), "2+2", "1/0", "5").components["evaluates_all"].scores
    assert [s.value for s in of_group] == [1.0, 0.0, 0.0] and of_group[1].status == "crashed"
    three = [completion("a"), completion("b", length=2), completion("c")]
    group = load(project, "of_ids", timeout=2.0).score_group(PROBLEM, np.array([1]), three)
    assert [s.value for s in group.components["of_ids"].scores] == [1.0, 0.0, 1.0]


def test_a_function_that_hangs_on_a_rehearsal_is_an_error(project: Path) -> None:
    with pytest.raises(RewardError, match=r"reward pattern on problem p: no answer within 0\.5 s"):
        judged(load(project, "pattern", timeout=0.5), "a" * 40 + "b", strict=True)


def test_whoever_was_beside_one_that_ends_the_process_is_asked_again(project: Path, capsys) -> None:
    scores = judged(load(project, "together"), "a", "exit").components["together"].scores
    assert scores[1].value == 0 and "exit code 3" in scores[1].detail


def test_one_that_raises_shows_the_line_of_the_users_file(project: Path, capsys) -> None:
    with pytest.raises(RewardError) as caught:
        rehearse(PROBLEM, load(project, "raises"))
    assert "KeyError: 'wrong' (users.py:" in str(caught.value)
    assert 'return gold["wrong"]' in str(caught.value)
    judged(load(project, "raises"), "a")
    assert "Traceback" in capsys.readouterr().err


def test_a_broken_contract_is_an_error_there_too(project: Path) -> None:
    with pytest.raises(
        RewardError, match=r"reward text on problem p: returned str 'good', not a finite number"
    ):
        judged(load(project, "text"), "a")


def test_no_reward_changes_the_row_that_others_see(project: Path) -> None:
    def spoils_too(completion, parts):
        parts.clear()
        return 1.0

    rewards = load_rewards(["users.py:spoils", spoils_too, "users.py:sees"], project)
    assert judged(rewards, "a", "b").rewards.tolist() == [4.0, 4.0]
    assert PROBLEM.columns["parts"] == [1, (2.5, b"x")]


def test_what_cannot_be_sent_is_said(project: Path) -> None:
    problem = Problem("p", "?", {"parts": [date(2026, 1, 1)]})
    with pytest.raises(RewardError, match=r"column 'parts' holds a date.*inline"):
        load(project, "sees").score_group(problem, np.array([1]), [completion("a")])


def test_a_file_that_fails_to_import_there_is_an_error(project: Path) -> None:
    rewards = load(project, "counts")
    (project / "users.py").write_text("import no_such_module")
    with pytest.raises(RewardError, match=r"users.py:counts cannot be imported: .*ModuleNotFoundError"):
        judged(rewards, "a")


def test_threads_and_processes_do_not_grow_from_step_to_step(project: Path) -> None:
    rewards = load_rewards(["math_answer", "users.py:counts"], project)

    def step() -> int:
        judged(rewards, "4", "5")
        ask_canaries(Scorer(rewards), PROBLEM, {})
        return threading.active_count()

    first = [step(), step()][-1]
    assert [step() for _ in range(5)][-1] <= first


def test_workers_end_with_the_rewards_that_own_them(project: Path) -> None:
    rewards = load(project, "where")
    pid = int(judged(rewards, "a").rewards[0])
    threads = threading.active_count()
    (link,) = rewards.callers["where"].links
    del rewards
    import gc

    gc.collect()
    for _ in range(200):
        if link.gone and not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() and threading.active_count() < threads


def test_a_killed_trainer_leaves_no_worker(project: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; import numpy as np\n"
        "from covey.rewards.loading import load_rewards; from covey.types import *\n"
        "rewards = load_rewards(['users.py:where'], Path(sys.argv[1]))\n"
        "done = Completion(np.zeros(1, np.int64), np.zeros(1, np.float32), 'a', 'stop')\n"
        "print(int(rewards.score_group(Problem('p', '?'), np.array([1]), [done]).rewards[0]), flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, project], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.02)
    raise AssertionError("it is still there")


def test_async_functions_given_as_objects_stay_here() -> None:
    async def mine(completion):
        await asyncio.sleep(0)
        return 1.0

    rewards = load_rewards([mine], Path())
    assert rewards.inline == ["mine"] and judged(rewards, "a").rewards.tolist() == [1.0]


def test_a_function_named_by_its_package_is_found_there_too(tmp_path: Path) -> None:
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text("")
    (tmp_path / "mypackage" / "two.py").write_text("def two():\n    return 2.0\n")
    (tmp_path / "mypackage" / "judges.py").write_text(
        "from .two import two\ndef says_two(completion):\n    return two()\n"
    )
    rewards = load_rewards(["mypackage.judges:says_two"], tmp_path)
    assert rewards.inline == [] and judged(rewards, "a").rewards.tolist() == [2.0]


def test_a_file_that_begins_a_run_begins_none_there(project: Path) -> None:
    rewards = load(project, "counts")
    (project / "users.py").write_text("import covey\ncovey.train(model='tiny', output='never')\n")
    with pytest.raises(RewardError, match="starts a run when it is imported"):
        judged(rewards, "a")


def test_a_worker_has_the_variables_that_are_set_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\ndef key(completion):\n    return float(os.environ.get('COVEY_TEST_KEY', -1))\n"
    )

    def paid() -> float:
        rewards = load_rewards(["mine.py:key"], tmp_path)
        return float(rewards.score_group(PROBLEM, np.array([1]), [completion()], strict=True).rewards[0])

    assert paid() == -1
    monkeypatch.setenv("COVEY_TEST_KEY", "5")  # as in a notebook, after a first run without
    assert paid() == 5
    monkeypatch.delenv("COVEY_TEST_KEY")
    assert paid() == -1
