"""Environments: an object for each completion, which keeps what calls do to it, may hang, may die."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from covey.config.sampling import ToolUse
from covey.rollouts.metrics import tool_metrics
from covey.sampling.tools import running
from covey.sampling.tools.definitions import load_tools
from covey.sampling.tools.running import ERROR
from covey.sampling.tools.use import initial_state, with_schemas
from covey.tasks.source import Source
from covey.types import Group, Problem, Transcript
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, DataError, RewardError
from tests import fakes
from tests.sampling.tools.environments import FILE, ROW, episode, said, toolbox

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path


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
    allowed = box.allowance(box.time_limit())
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
