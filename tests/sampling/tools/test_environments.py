"""Environments: an object for each completion, which keeps what calls do to it, may hang, may die."""

from __future__ import annotations

import importlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox
from covey.insight.rescore import rescore
from covey.insight.show import show_group
from covey.models.policy import Policy, save_policy
from covey.rewards.audit import rehearse
from covey.rewards.contract import Context, Reward
from covey.rewards.environments import environment_reward
from covey.rewards.loading import load_rewards
from covey.rng import key
from covey.rollouts.metrics import tool_metrics
from covey.runs.pending import PendingCompletions
from covey.runs.rollouts import read_rollouts
from covey.sampling.base import Request, Sampled, SamplingParams
from covey.sampling.local import LocalSampler, Owner
from covey.sampling.tools import running, turns
from covey.sampling.tools.definitions import load_tools
from covey.sampling.tools.environments import Episode
from covey.sampling.tools.running import ERROR, Toolbox
from covey.sampling.tools.turns import TurnSampler
from covey.sampling.tools.use import initial_state, with_schemas
from covey.system.signals import Stopped
from covey.tasks.source import Source
from covey.types import Completion, Group, Problem, Transcript
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, DataError, RewardError
from covey_verify.sandbox.wire import Attributes, decode_value, encode_value
from covey_verify.types import Score
from tests import fakes
from tests.conftest import policy_of, random_prompts
from tests.training.runs import StopAt, fingerprint, start

FILE = '''
import asyncio, os, random, time
import numpy as np

class Counter:
    """Counts, from the row's column."""

    def __init__(self):
        self._lock = object()
        self.total, self.most = 0, 9

    def reset(self, start: int, step: int = 1):
        self.total, self.step, self.lucky = start, step, random.random()
        self.seen, self.handle = np.zeros(2), object()

    def add(self, times: int = 1, *, start: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.total += times * self.step
        return f"{self.total} from {start}"

    async def later(self) -> dict:
        """Count on, later."""
        await asyncio.sleep(0.001)
        self.total += 1
        return {"total": self.total}

    def hang(self) -> str:
        """Never ends."""
        while True:
            time.sleep(1)

    def die(self) -> str:
        """Ends its process."""
        os._exit(3)

    def get_reward(self):
        if self.total > 90:
            raise ValueError("too many")
        return self.total / 10

class Odd(Counter):
    def get_reward(self):
        return float("nan")

class Endless(Counter):
    get_reward = None
    def reset(self, start: int):
        super().reset(start)
        self.reward = float("inf")

class Words(Counter):
    def get_reward(self):
        return "won"

class Every(Counter):
    def reset(self, **columns):
        self.total, self.step, self.columns = 0, 1, columns

class Needs(Counter):
    def reset(self, answer):
        pass

class Broken(Counter):
    def reset(self):
        raise KeyError("gone")

class Speaks(Counter):
    def reset(self, start: int):
        super().reset(start)
        self.secret = random.random()
        return f" Begin at {start} with {self.secret}."
    def luck(self) -> str:
        """Draw a number."""
        return str(random.random())

class Moody(Counter):
    def reset(self):
        return f"It is {time.time()}."

class Mumbles(Counter):
    def reset(self, start: int):
        return None if start == 5 else "Welcome!"

class NoReset:
    pass

class Asks:
    def __init__(self, size): pass
    def reset(self): pass

class Nothing:
    def reset(self): pass
    def get_reward(self): return 1.0

class Silent:
    def reset(self): pass
    def look(self): return "nobody is told of this"

class Places:
    def reset(self): pass
    def look(self, word: str, /) -> str: "Look."

def function():
    pass

def even(completions, environments, **columns):
    return [float(own.total % 2 == 0) for own in environments]

def add(first: int) -> int:
    """Add.

    Args:
        first: One.
    """
'''
EXAMPLES = Path(__file__).parents[3] / "examples"
ROW = Problem("r/1", "count", {"start": 5, "answer": "6"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path


def toolbox(folder: Path, name: str = "Counter", **settings: Any) -> Toolbox:
    use = ToolUse(environment=f"game.py:{name}", **{"timeout": 20.0, **settings})
    return Toolbox(use, folder, Sandbox())


def episode(box: Toolbox, problem: Problem = ROW, seed: int = 1) -> Episode:
    found = box.episode(problem, seed)
    assert found is not None
    return found


def said(box: Toolbox, own: Episode, name: str, **given: object) -> str:
    (found,) = box.begin([ToolCall(name, given)], own.problem, own, box.allowance(box.waiting()))()
    return found


def test_calls_see_what_earlier_ones_did_and_not_what_others_do(folder: Path) -> None:
    box = toolbox(folder)
    one, other = episode(box), episode(box, seed=2)
    assert [said(box, one, "add"), said(box, one, "add", times=3)] == ["6 from 5", "9 from 5"]
    assert said(box, other, "add") == "6 from 5"
    assert said(box, one, "later") == '{"total": 10}'
    state, theirs = one.end().state, other.end().state
    assert state is not None and theirs is not None
    # No `_lock`, and no `handle`, which is no JSON; numpy's numbers are, and `reward` is get_reward's.
    assert state == {"total": 10, "most": 9, "step": 1, "seen": [0.0, 0.0], "reward": 1.0} | {
        "lucky": state["lucky"]
    }
    assert theirs["total"] == 6 and theirs["lucky"] == state["lucky"], "all of a row begin alike"
    again = episode(box)
    assert again.end().state == {**state, "total": 5, "reward": 0.5}, (
        "and the same ones in a run that is repeated"
    )


def test_calls_of_one_turn_come_one_after_another(folder: Path) -> None:
    box = toolbox(folder)
    own = episode(box)
    allowed = box.allowance(box.waiting())
    begun = [box.begin([ToolCall("add", {"times": n})], ROW, own, allowed) for n in range(1, 20)]
    totals = [int(results()[0].split()[0]) for results in begun]
    assert totals == np.cumsum([5, *range(1, 20)])[1:].tolist()
    own.close()


def test_the_model_is_told_of_public_methods_and_of_no_columns(folder: Path) -> None:
    box = toolbox(folder)
    assert list(box.functions) == ["add", "die", "hang", "later"]
    (told,) = [s["function"] for s in box.schemas if s["function"]["name"] == "add"]  # type: ignore[index]
    assert list(told["parameters"]["properties"]) == ["times"]
    own = episode(box)
    assert said(box, own, "add", number=2) == f"{ERROR}add has no argument 'number'; it takes times"
    assert said(box, own, "reset").startswith(f"{ERROR}there is no tool 'reset'")
    assert said(box, own, "add", times="two").startswith(f"{ERROR}add.times must be an integer")
    assert said(box, own, "add") == "6 from 5", "an exception ends nothing"
    own.close()


def test_reset_may_ask_for_all_columns(folder: Path) -> None:
    state = episode(toolbox(folder, "Every")).end().state
    assert state is not None and state["columns"] == {"start": 5, "answer": "6"}


@pytest.mark.parametrize(("method", "words"), [("hang", "no answer within 0.5 s"), ("die", "exit code 3")])
def test_one_that_hangs_or_dies_costs_its_own_completion(folder: Path, method: str, words: str) -> None:
    box = toolbox(folder, timeout=0.5 if method == "hang" else 20.0)
    lost, other = episode(box), episode(box)
    assert said(box, other, "add") == "6 from 5"
    assert words in said(box, lost, method)
    assert words in said(box, lost, "add"), "it stays dead, and the model is told why"
    assert lost.end().state is None
    assert (other.end().state or {})["total"] == 6


def test_a_reset_that_does_not_work_is_said_with_its_row(folder: Path) -> None:
    with pytest.raises(DataError, match=r"r/1: game\.py:Broken: reset failed: KeyError: 'gone'"):
        initial_state(toolbox(folder, "Broken"), ROW)


def test_prompts_end_with_what_reset_returns(folder: Path) -> None:
    chat = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]
    rows = [Problem("r/1", "Go.", {"start": 5}), Problem("r/2", chat, {"start": 7})]
    box = toolbox(folder, "Speaks")
    (text, messages), kept = (with_schemas(Source(rows, own), box).train for own in ([], rows))
    assert isinstance(text.prompt, str) and text.prompt.startswith("Go. Begin at 5 with 0.")
    assert messages.prompt[0] == chat[0] and messages.prompt[1]["content"].startswith(
        "Go. Begin at 7 with 0."
    )
    assert text.prompt.split()[-1] != messages.prompt[1]["content"].split()[-1], "each row has its own luck"
    heard: list[str] = []
    many = [replace(rows[0], id=f"r/{n}") for n in range(running.MANY_RESETS + 1)]
    assert len({p.prompt for p in with_schemas(Source(many, []), box, heard.append).train}) == len(many)
    assert heard == ["game.py:Speaks: calling reset for each of 501 prompts"]
    again = with_schemas(Source([text], []), box).train
    assert again == [text] == kept[:1], "what an earlier stage has kept ends so already"

    siblings = [box.episode(text, seed) for seed in (1, 2)]
    drawn = [box.result(ToolCall("luck", {}), text, own) for own in siblings]
    assert drawn[0] != drawn[1], "from then on each completion has its own luck"
    secrets = {(own.end().state or {})["secret"] for own in siblings if own is not None}
    assert len(secrets) == 1 and text.prompt.endswith(f"{secrets.pop()}.")


@pytest.mark.parametrize(("name", "start"), [("Moody", 5), ("Mumbles", 6)])
def test_a_reset_that_says_something_else_than_the_prompt_is_refused(
    folder: Path, name: str, start: int
) -> None:
    rows = [Problem("r/1", "Go.", {"start": 5}), Problem("r/2", "Go.", {"start": start})]
    box = toolbox(folder, name)
    told = with_schemas(Source(rows, []), box).train
    with pytest.raises(
        DataError, match=r"r/2: game\.py:\w+: reset returned '.*', but the prompt does not end with it"
    ):
        initial_state(box, told[1])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("get_reward", "get_reward raised ValueError: too many on problem r/1"),
        ("Odd", "it returned nan; a finite number or None is expected"),
        ("Endless", "its attribute reward is inf; a finite number or None is expected"),
        ("Words", "it returned 'won'; a finite number or None is expected"),
    ],
)
def test_a_reward_that_fails_after_a_call_costs_its_completion_alone(
    folder: Path, method: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    box = toolbox(folder, "Counter" if method == "get_reward" else method)
    for times in (90, 91):
        own = episode(box)
        said(box, own, "add", times=times)
        end = own.end()
        assert (end.state, words in end.fault) == (None, True)
    assert capsys.readouterr().err.count("this completion gets 0") == 1, "said once"
    untouched = episode(box)
    if method == "get_reward":
        assert (untouched.end().state or {})["reward"] == 0.5
        return
    with pytest.raises(RewardError, match=re.escape(words)):  # nobody called: nobody but the user can have
        untouched.end()


def test_so_many_failures_are_not_the_models() -> None:
    def group(faults: int) -> Group:
        none = np.zeros(1, np.int64)
        ends = (Transcript(fault="raised" * (n < faults)) for n in range(4))
        each = (replace(fakes.completion("a"), transcript=end) for end in ends)
        return Group(ROW, none, tuple(each), np.zeros(4))

    assert tool_metrics([group(2)])["tools/broken"] == 0.5
    with pytest.raises(RewardError, match=r"3 of 4 completions failed .*the last error: raised"):
        tool_metrics([group(3)])


def test_columns_have_to_be_there_and_to_be_plain(folder: Path) -> None:
    box = toolbox(folder)
    with pytest.raises(DataError, match=r"r/2: the tool add asks for column 'start'"):
        with_schemas(Source([Problem("r/2", "", {})], []), box)
    with pytest.raises(DataError, match=r"r/2: game.py:Needs.reset asks for column 'answer'"):
        with_schemas(Source([Problem("r/2", "", {"start": 5})], []), toolbox(folder, "Needs"))
    with pytest.raises(DataError, match=r"r/2: rename column 'environment': rewards get"):
        with_schemas(Source([Problem("r/2", "", {"start": 5, "environment": "linux"})], []), box)
    with pytest.raises(DataError, match=r"columns start cannot be sent to the process of game\.py:Counter"):
        initial_state(box, Problem("r/3", "", {"start": object()}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoReset", "must be a class with a method `reset`"),
        ("function", "must be a class with a method `reset`"),
        ("Asks", "asks for 'size', but the class is called without arguments"),
        ("Nothing", "no public method except `reset`"),
        ("Silent", "look"),
        ("Places", "takes its arguments by name"),
        ("Missing", "defines no function 'Missing'"),
    ],
)
def test_what_is_no_environment_is_refused_before_a_model_is_loaded(
    folder: Path, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        toolbox(folder, name)


def test_the_example_plays_by_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    guessing = importlib.import_module("guessing")
    assert list(load_tools(ToolUse(environment="guessing.py:Game"), EXAMPLES)) == ["guess"]
    game = guessing.Game()
    for secret in range(1, guessing.NUMBERS + 1):
        game.reset(secret=secret)
        low, high = 1, guessing.NUMBERS
        while not game.won:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if game.guess(middle) == "higher" else (low, middle - 1)
        assert (game.guesses <= guessing.GUESSES, game.get_reward()) == (True, 1.0)
    games = [guessing.watched(random.Random(n)) for n in range(400)]
    won = sum("found" in [turn["content"] for turn in game["completion"]] for game in games)
    assert 0.4 < won / len(games) < 0.65, "a quarter wins always, the others with 1 - (6/7)^3 = 37 %: 53 %"


def test_a_tool_and_a_method_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="two functions have the name add"):
        toolbox(folder, functions=("game.py:add",))
    assert "calculate" in toolbox(folder, functions=("calculate",)).functions


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
    counter = StopAt()
    start(folder / "whole", stop=counter, **settings)
    with pytest.raises(Stopped):
        start(folder / "parts", stop=StopAt(counter.checks * 2 // 3), **settings)
    start(folder / "parts", **settings)
    assert fingerprint(folder / "whole") == fingerprint(folder / "parts")
    for own in read_rollouts(folder / "whole", 0).rows:
        total = own["environment"]["total"]
        assert own["components"] == {"environment_reward": total / 10, "even": float(total % 2 == 0)}
    shown = show_group(folder / "whole", 0, 0)[1]
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


# --- what rewards see ---------------------------------------------------------------------------------


def completion(state: dict[str, object] | None) -> Completion:
    return Completion(np.array([1]), np.zeros(1), "x", "stop", transcript=Transcript(environment=state))


def one(completion: str, environment: Attributes) -> float:
    return environment.total + len(completion)


def several(completions: list[str], environments: list[Attributes], **_: object) -> list[float]:
    return [own.total for own in environments]


def given(function: Any, *states: dict[str, object] | None, columns: Any = None) -> dict[str, object]:
    problem = Problem("p", "", columns or {})
    return Reward("r", function).arguments(problem, [completion(s) for s in states], Context())


def test_rewards_read_attributes() -> None:
    assert one(**given(one, {"total": 3})) == 4  # type: ignore[arg-type]
    assert several(**given(several, {"total": 3}, {"total": 4})) == [3, 4]  # type: ignore[arg-type]
    assert given(one, None)["environment"] is None
    assert given(one, None, columns={"environment": "linux"})["environment"] == "linux"
    assert given(one, {})["environment"] == Attributes(), "one without attributes has not died"
    state = Attributes(total=3, cells=[1, {"a": None}])
    assert decode_value(encode_value([state])) == [state]


@pytest.mark.parametrize("isolate", ["worker", "process", "inline"])
def test_wherever_they_are_judged(tmp_path: Path, isolate: str) -> None:
    (tmp_path / "r.py").write_text(
        "from covey import reward\n"
        f"@reward(isolate={isolate!r})\n"
        "def total(completions, environments, **_):\n    return [e.total for e in environments]\n"
    )
    rewards = load_rewards(["r.py:total"], tmp_path)
    scored = rewards.score_group(ROW, np.zeros(1, np.int64), [completion({"total": n}) for n in (2, 3)])
    assert scored.rewards.tolist() == [2, 3]


@pytest.mark.parametrize("isolate", ["worker", "inline"])
def test_an_environment_that_is_gone_costs_its_own_completion_alone(tmp_path: Path, isolate: str) -> None:
    (tmp_path / "r.py").write_text(
        f"from covey import reward\n@reward(isolate={isolate!r}, weight=1.0)\n"
        "def group(completions, environments, **_):\n"
        "    most = max(e.total for e in environments)\n"
        "    return [float(e.total == most) for e in environments]\n"
        f"@reward(isolate={isolate!r}, weight=0.0)\n"
        "def single(completion, environment):\n    return environment.total\n"
        f"@reward(isolate={isolate!r}, weight=0.0)\n"
        "def knows(completions, environments=None):\n"
        "    return [0.5 if e is None else 1 for e in environments]\n"
    )
    rewards = load_rewards([{"r.py:group": {"verdict": True}}, "r.py:single", "r.py:knows"], tmp_path)
    states = [{"total": 2}, None, {"total": 3}]
    scored = rewards.score_group(ROW, np.zeros(1, np.int64), [completion(s) for s in states])
    assert scored.rewards.tolist() == [0, 0, 1]
    assert {n: [s.status for s in own.scores] for n, own in scored.components.items()} == {
        "group": ["ok", "crashed", "ok"], "single": ["ok", "crashed", "ok"], "knows": ["ok"] * 3,
    }  # fmt: skip
    assert scored.components["single"].values.tolist() == [2, 0, 3]
    assert scored.components["knows"].values.tolist() == [1, 0.5, 1]
    lost = rewards.score_group(ROW, np.zeros(1, np.int64), [completion(None)] * 2)
    assert lost.rewards.tolist() == [0, 0]


def test_its_own_reward() -> None:
    assert environment_reward("", Attributes(reward=0.25)) == Score(0.25)
    assert environment_reward("", None) == Score(
        0.0, "crashed", detail="the environment hung or died, or its get_reward raised"
    )
    with pytest.raises(
        RewardError, match="neither a method get_reward nor an attribute reward; it has total"
    ):
        environment_reward("", Attributes(total=1))


def test_a_reward_that_asks_for_an_environment_needs_one(folder: Path) -> None:
    rewards = load_rewards(["environment_reward"], folder)
    with pytest.raises(
        ConfigError, match=r"asks for the completion's environment.*rollout.tools.environment"
    ):
        rehearse(ROW, rewards)
    assert rehearse(ROW, rewards, initial_state(toolbox(folder), ROW)).rewards.tolist() == [0.5, 0.5]


def kept_again(run: Path, state: dict[str, object] | None) -> Iterator[Completion | None]:
    request, params = requests()[0], SamplingParams(4)
    PendingCompletions(run).add(0, request, params, Sampled(0, 0, completion(state)))
    yield PendingCompletions(run).find(0, request, 0, params)


@pytest.mark.parametrize("state", [None, {"total": 3, "cells": [1, {"a": None}]}])
def test_what_was_sampled_ahead_keeps_its_state(tmp_path: Path, state: dict[str, object] | None) -> None:
    (again,) = kept_again(tmp_path, state)
    assert again is not None and again.transcript.environment == state
