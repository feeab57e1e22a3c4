"""Tools as a user offers them: loaded, described, run in processes that may hang or die."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from covey.config.sampling import ToolUse
from covey.config.schema import Sandbox
from covey.sampling.tools.running import ERROR, Toolbox
from covey.sampling.tools.use import with_schemas
from covey.tasks.examples import Example
from covey.tasks.source import Source
from covey.types import Problem
from covey_verify.calls.call import ToolCall
from covey_verify.errors import ConfigError, CoveyError, DataError
from covey_verify.sandbox.base import Outcome

FILE = '''
import os, time

def look_up(word: str, times: int = 1, *, glossary: dict[str, str]) -> str:
    """The meaning of a word.

    Args:
        word: What to look up.
        times: How often to say it.
    """
    return glossary[word] * times

async def later(word: str) -> dict:
    """Says it later.

    Args:
        word: What to say.
    """
    return {"said": word}

def hangs() -> str:
    """Never ends."""
    while True:
        time.sleep(1)

def dies() -> str:
    """Ends its process."""
    os._exit(3)

def silent(word: str) -> str:
    return word

def bare(word) -> str:
    """Without annotations.

    Args:
        word: One.
    """

def many(*words: str) -> str:
    """With a star."""

def yields() -> str:
    """In parts."""
    yield "a"

def long() -> str:
    """Much."""
    return "\U0001f426" * 10**6

def counted() -> dict:
    """Numbers of numpy."""
    import numpy
    return {"one": numpy.int64(1), "all": numpy.array([0.5])}
'''
PROBLEM = Problem("p", "?", {"glossary": {"covey": "a small flock of birds"}})


def toolbox(folder: Path, *names: str, timeout: float = 10.0, most: int = 256) -> Toolbox:
    (folder / "mine.py").write_text(FILE)
    functions = tuple(n if n in ("calculate", "python") else f"mine.py:{n}" for n in names)
    use = ToolUse(functions=functions, timeout=timeout, result_tokens=most, seconds=max(60.0, timeout))
    return Toolbox(use, folder, Sandbox())


def test_a_function_gets_what_the_model_says_and_columns_of_the_row(tmp_path: Path) -> None:
    box = toolbox(tmp_path, "look_up", "later")
    assert box.result(ToolCall("look_up", {"word": "covey"}), PROBLEM) == "a small flock of birds"
    assert box.result(ToolCall("look_up", {"word": "covey", "times": 2}), PROBLEM).count("flock") == 2
    assert box.result(ToolCall("later", {"word": "a"}), PROBLEM) == '{"said": "a"}'


def test_the_model_is_told_of_its_arguments_and_not_of_columns(tmp_path: Path) -> None:
    (schema,) = toolbox(tmp_path, "look_up").schemas
    assert schema["function"]["name"] == "look_up"
    assert schema["function"]["description"] == "The meaning of a word."
    assert set(schema["function"]["parameters"]["properties"]) == {"word", "times"}
    assert schema["function"]["parameters"]["required"] == ["word"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("look_up", {"word": "unknown"}), "KeyError: 'unknown'"),
        (ToolCall("look_up", {}), "lacks 'word'; it takes word, times"),
        (ToolCall("look_up", {"word": "covey", "glossary": {"covey": "mine"}}), "has no argument 'glossary'"),
        (ToolCall("lookup", {}), "there is no tool 'lookup'; there are look_up"),
        (ToolCall("", {}, "this is no JSON"), "this is no JSON"),
    ],
)
def test_the_model_reads_what_it_did_wrong(tmp_path: Path, call: ToolCall, words: str) -> None:
    said = toolbox(tmp_path, "look_up").result(call, PROBLEM)
    assert said.startswith(ERROR)
    assert words in said


def test_a_call_that_hangs_or_dies_costs_itself(tmp_path: Path) -> None:
    box = toolbox(tmp_path, "hangs", "dies", "calculate", timeout=0.5)
    begun = time.monotonic()
    calls = [ToolCall("hangs", {}), ToolCall("dies", {}), ToolCall("calculate", {"expression": "6*7"})]
    said = box.begin(calls, PROBLEM, None, box.allowance(box.time_limit()))()
    assert "no answer within 0.5 s" in said[0]
    assert said[1].startswith(ERROR)
    assert said[2] == "42"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("most", [1, 10_000])
def test_a_long_result_arrives_with_more_tokens_than_may_be_inserted(tmp_path: Path, most: int) -> None:
    """Otherwise nothing would say that it is cut."""
    box = toolbox(tmp_path, "long", most=most)
    assert box.result(ToolCall("long", {}), PROBLEM) == "\U0001f426" * min(128 * most + 1, 10**6)


def test_a_number_of_numpy_is_a_number(tmp_path: Path) -> None:
    box = toolbox(tmp_path, "counted")
    assert box.result(ToolCall("counted", {}), PROBLEM) == '{"one": 1, "all": [0.5]}'


def test_a_call_that_cannot_be_tried_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = toolbox(tmp_path, "look_up")
    monkeypatch.setattr(box.server, "call", lambda *_, **__: Outcome("lost", text="no more processes"))
    with pytest.raises(CoveyError, match="look_up could not be run: no more processes"):
        box.begin([ToolCall("look_up", {"word": "covey"})], PROBLEM, None, box.allowance(box.time_limit()))()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(6 * 7)", "42"),
        ("print(1)\nx = [\n", "error: SyntaxError"),
        ("def f():\n    return y\nprint('a')\nf()", "a\nerror: NameError: name 'y' is not defined (line 2)"),
        ("raise SystemExit(3)", ""),
        ("import socket; socket.socket()", "error: "),
        ("print('x' * 10**5)", "xxx"),
        ("print('x' * 10**7)", "error: more than"),
    ],
)
def test_programs_run_in_the_sandbox(tmp_path: Path, code: str, said: str) -> None:
    assert toolbox(tmp_path, "python").result(ToolCall("python", {"code": code}), PROBLEM).startswith(said)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["silent"], "silent: .*docstring"),
        (["bare"], "bare: .*type hint"),
        (["many"], r"by name, so / and \*args"),
        (["yields"], "this one yields; return a list"),
        (["absent"], "defines no function 'absent'"),
        (["look_up", "look_up"], "two functions have the name look_up"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_before_anything_runs(
    tmp_path: Path, names: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        toolbox(tmp_path, *names)


def test_a_row_without_a_column_that_a_tool_asks_for_is_refused(tmp_path: Path) -> None:
    box = toolbox(tmp_path, "look_up")
    with pytest.raises(DataError, match="q: the tool look_up asks for column 'glossary'"):
        with_schemas(Source([PROBLEM, Problem("q", "?")], []), box)


def test_chats_tell_the_model_of_its_tools(tmp_path: Path) -> None:
    own = [{"name": "mine"}]
    said = [{"role": "user", "content": "?"}]
    box, glossary = toolbox(tmp_path, "look_up"), PROBLEM.columns
    problems = [Problem("a", said, glossary), Problem("b", said, glossary, {"tools": own}), PROBLEM]
    told = with_schemas(Source(problems, []), box).train
    assert [p.template.get("tools") for p in told] == [box.schemas, own, None]
    examples = [Example("answer", problem, ("4",), (1.0,)) for problem in problems]
    learned = with_schemas(Source([], [], examples=examples), box).examples
    assert [e.problem.template.get("tools") for e in learned] == [box.schemas, own, None], "as in rollouts"


def test_a_column_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    box = toolbox(tmp_path, "look_up")
    odd = Problem("p", "?", {"glossary": {"covey": object()}})
    with pytest.raises(DataError, match="p: columns glossary cannot be sent"):
        box.result(ToolCall("look_up", {"word": "covey"}), odd)


def test_a_tool_finds_files_of_the_folder_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds.txt").write_text("a covey")
    reading = '''
from pathlib import Path
WORDS = Path("birds.txt").read_text()
def read() -> str:
    """Reads."""
    return WORDS
'''
    (tmp_path / "reads.py").write_text(reading)
    box = Toolbox(ToolUse(functions=("reads.py:read",)), tmp_path, Sandbox())
    assert box.result(ToolCall("read", {}), PROBLEM) == "a covey"


def test_a_mistyped_tool_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'calculat' is unknown.*calculate"):
        Toolbox(ToolUse(functions=("calculat",)), tmp_path, Sandbox())


BOXED = '''
from pathlib import Path

class Notes:
    """What a model writes stands beside the user's files."""
    def reset(self, *, key: str): self.key, self.reward = key, 0.0
    def read(self, name: str) -> str:
        """Read.

        Args:
            name: A file.
        """
        return Path(name).read_text()
    def work_out(self, words: str) -> str:
        """Evaluate.

        Args:
            words: An expression.
        """
        self.reward = float(eval(words) == 42)
        return str(self.reward)

def read(name: str) -> str:
    """Read.

    Args:
        name: A file.
    """
    return Path(name).read_text()

async def later(name: str) -> str:
    """Wait.

    Args:
        name: A file.
    """
    return name
'''


@pytest.mark.parametrize("kind", ["functions", "environment"])
@pytest.mark.parametrize("isolate", ["process", "sandbox"])
def test_a_users_tool_in_the_sandbox_reads_no_file_of_the_user(
    tmp_path: Path, kind: str, isolate: str
) -> None:
    (tmp_path / "boxed.py").write_text(BOXED)
    key = tmp_path / "key.txt"
    key.write_text("secret")
    use = {"functions": ("boxed.py:read",)} if kind == "functions" else {"environment": "boxed.py:Notes"}
    box = Toolbox(ToolUse(**use, isolate=isolate), tmp_path, Sandbox())
    row = Problem("p", "?", {"key": "k"})
    episode = box.episode(row, seed=0)
    said = box.result(ToolCall("read", {"name": str(key)}), row, episode)
    assert (said == "secret") == (isolate == "process"), said
    if episode is not None:
        assert box.result(ToolCall("work_out", {"words": "6*7"}), row, episode) == "1.0"
        assert episode.end().state == {"key": "k", "reward": 1.0}


def test_an_async_tool_is_refused_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "boxed.py").write_text(BOXED)
    with pytest.raises(ConfigError, match="async"):
        Toolbox(ToolUse(functions=("boxed.py:later",), isolate="sandbox"), tmp_path, Sandbox())
