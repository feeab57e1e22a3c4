"""A second call of `covey.train` with another reward or other rows says so and takes no old verdict."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.objects import ROWS, SMALL

import covey
from covey.cli import main
from covey.runs.fingerprints import fingerprint_of, hash_of
from covey_verify.errors import ConfigError

SOURCE = """
import re
SEEN = {}
LIMIT = 3
def helper(text):
    return len(text) % 5
def score(completion, *, a=1):
    SEEN[completion] = 1
    return (helper(completion) + a) / (LIMIT + 20)
class Object:
    def __init__(self, n):
        self.n, self.lock, self.calls = n, threading.Lock(), 0
    def __call__(self, completion):
        self.calls += 1
        return float(len(completion) % self.n)
"""


def cell(source: str = SOURCE, name: str = "score") -> Any:
    """What a cell of a notebook has defined."""
    space: dict[str, Any] = {"__name__": "__main__", "threading": threading}
    exec(compile(source, f"<cell {id(source)}>", "exec"), space)
    return space[name]


def make(n: int) -> Callable[..., float]:
    def has(completion: str) -> float:
        return float(len(set(completion)) % n) / n

    return has


def train(output: Path, reward: object, **settings: Any) -> Any:
    values = {**SMALL, "data": ROWS, **settings}
    return covey.train(model="tiny", rewards=[reward], output=output, **values)


def test_what_has_changed_is_named_and_overwrite_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train(run, make(7))
    assert train(run, make(7)) == first  # the same, made once more
    with pytest.raises(ConfigError, match=r"reward has: `n` of the closure changed.*overwrite=True"):
        train(run, make(3))
    with pytest.raises(ConfigError, match=r"rows of data\.train changed"):
        train(run, make(7), data=[{**row, "answer": "0"} for row in ROWS])
    (run / "notes.txt").write_text("mine")
    train(run, make(3), overwrite=True)
    assert train(run, make(3)).steps == 2
    assert (run / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="`n` of the closure changed"):
        train(run, make(7))


def test_an_interrupted_run_continues_with_what_it_had_unless_it_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, make(7))
    (run / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"holds a run with other rewards.*covey\.resume"):
        train(run, make(3), train={**SMALL["train"], "steps": 3})
    assert covey.resume(run, rewards=[make(3)], data=ROWS, train={"steps": 3}, quiet=True).steps == 3


def test_a_function_that_fills_what_it_holds_is_the_same(tmp_path: Path) -> None:
    run, one = tmp_path / "run", cell()
    train(run, one)
    train(run, one)  # whose SEEN is full by now
    train(run, cell("# a comment\n\n" + SOURCE))  # whose SEEN is empty
    for edit in (("LIMIT = 3", "LIMIT = 4"), ("% 5", "% 6"), ("a=1", "a=2"), ("20", "30")):
        with pytest.raises(ConfigError, match="reward score: "):
            train(run, cell(SOURCE.replace(*edit)))


def test_a_file_that_a_run_has_used_may_not_change_under_its_verdict(tmp_path: Path, capsys) -> None:
    (tmp_path / "r.py").write_text("def ok(completion):\n    return len(completion) % 3\n")
    config = tmp_path / "c.yaml"
    config.write_text(
        "data: {task: last_digit, train_size: 16, test_size: 4}\nrewards: ['r.py:ok']\nthreads: 1\n"
        "rollout: {group_size: 2, prompts_per_step: 2, max_tokens: 4}\ntrain: {steps: 2, lr: 1.0e-3}\n"
        "eval: {problems: 2, samples: 1}\n"
    )
    command = ["train", str(config), "--output", str(tmp_path / "run")]
    main(command)
    assert main(command) in (0, 1)
    (tmp_path / "r.py").write_text(
        "# only a comment\n\ndef ok(completion):\n    return len(completion) % 3\n"
    )
    assert main(command) in (0, 1)
    (tmp_path / "r.py").write_text("def ok(completion):\n    return len(completion) % 4\n")
    capsys.readouterr()
    assert main(command) == 2
    assert "reward r.py:ok: the code changed" in capsys.readouterr().err


def test_a_changed_data_file_is_named_by_its_place_in_the_project(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = Path("rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    train(tmp_path / "run", make(7), data={"train": "rows.jsonl"})
    rows.write_text(rows.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"other rewards or data: rows\.jsonl changed"):
        train(tmp_path / "run", make(7), data={"train": "rows.jsonl"})


def same(one: object, other: object) -> bool:
    return fingerprint_of(one) == fingerprint_of(other)


def test_callables_are_compared_by_what_they_do() -> None:
    made, again = cell(name="Object"), cell(name="Object")
    edited = cell(SOURCE.replace("% self.n", "% self.n + 1"), "Object")
    assert same(made(3), again(3))
    assert not same(made(3), again(4))
    assert not same(made(3), edited(3))
    assert same(made(3).__call__, again(3).__call__)
    assert not same(made(3).__call__, made(4).__call__)
    assert same(functools.partial(cell(), a=2), functools.partial(cell(), a=2))
    assert not same(functools.partial(cell(), a=2), functools.partial(cell(), a=3))
    assert same(lambda completion: 1.0, lambda completion: 1.0)
    assert not same(lambda completion: 1.0, lambda completion: 2.0)
    inner = "def outer():\n    def f(completion):\n        return {0}\n    return f\nf = outer()"
    assert same(cell(inner.format("1"), "f"), cell(inner.format("1"), "f"))
    assert not same(cell(inner.format("1"), "f"), cell(inner.format("2"), "f"))


def test_values_are_compared_by_content() -> None:
    assert hash_of({"a": {1, 2}, "b": (1,)}) == hash_of({"b": (1,), "a": {2, 1}})
    assert hash_of([1]) != hash_of([True])
    assert hash_of([1, 2]) != hash_of([2, 1])
    loop: list[object] = [1]
    loop.append(loop)
    assert hash_of(loop) == hash_of(loop)
    assert hash_of(object()) == hash_of(object())  # no address
