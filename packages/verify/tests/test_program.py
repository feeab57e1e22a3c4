"""`covey-verify` as a user meets it: a table over a file, attacks, and errors that name the row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import covey_verify
from covey_verify.__main__ import main
from covey_verify.rewards import BUILT_IN

ROWS = [
    {"prompt": "1/4 = ?", "completion": "<think>a quarter</think>\\boxed{0.25}", "answer": "1/4"},
    {"prompt": "2+2 = ?", "completion": "\\boxed{5}", "answer": "4"},
    {"prompt": "2+3 = ?", "completion": [{"role": "assistant", "content": "\\boxed{5}"}], "answer": "5"},
]
GOOD = """
def good(completion, answer):
    spoken = completion.rpartition("</think>")[2]
    if "<think>" in spoken:
        return 0.0
    return float(spoken.rpartition("<answer>")[2].partition("</answer>")[0].strip() == answer)
"""
BAD = {
    "contains": ("def contains(completion, answer): return float(answer in completion)", "contradicted"),
    "evaluates": (
        (
            "import re\ndef evaluates(completion, answer):\n"
            "    found = re.findall(r'\\\\boxed\\{(.*)\\}', completion)\n"
            "    return float(eval(found[-1]) == float(answer)) if found else 0.0"
        ),
        "an injection (the function failed)",
    ),
    "returns_text": (
        "def returns_text(completion): return 'a' if 'passwd' in completion else 0.0",
        "an injection (the function failed)",
    ),
    "of_group": ("def of_group(completions, **_): return [1.0] * len(completions)", "empty"),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tried.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "tried.jsonl"


def test_each_row_gets_its_rewards_and_each_reward_its_mean(file: Path, capsys) -> None:
    words = ["--reward", "math_answer", "rule=boxed", "--reward", "think_format", "strict=false", "--json"]
    assert main(["score", str(file), *words]) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["rewards"] for row in rows] == [
        {"math_answer": 1.0, "think_format": 1.0},
        {"math_answer": 0.0, "think_format": 0.0},
        {"math_answer": 1.0, "think_format": 0.0},
    ]
    assert rows[0]["extracted"] == {"math_answer": "0.25"} and rows[0]["prompt"] == "1/4 = ?"
    assert said.err.splitlines() == [
        "math_answer   mean 0.667 of 3 rows: 3 ok",
        "think_format  mean 0.333 of 3 rows: 3 ok",
    ]


def test_a_function_that_raises_costs_its_own_rows_and_says_where(file: Path, capsys) -> None:
    Path("mine.py").write_text(
        "def mine(completion, answer):\n    if answer == '4':\n        raise KeyError(4)\n    return 1.0\n"
    )
    assert main(["score", str(file), "--reward", "mine.py:mine", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["rewards"]["mine"] for row in rows] == [1.0, None, 1.0]
    assert "KeyError: 4 (mine.py:3: raise KeyError" in rows[1]["detail"]["mine"]


@pytest.mark.parametrize(
    ("line", "words", "code", "says"),
    [
        ("", ["math_anser"], 2, "did you mean math_answer?"),
        ("", ["math_answer", "rul=boxed"], 2, "math_answer has no setting 'rul'; did you mean rule?"),
        ("", ["math_answer", "rule=box"], 2, "math_answer.rule: 'box' is not one of boxed, answer_tag"),
        ("", ["math_answer", "boxed"], 2, "'boxed' is not SETTING=VALUE"),
        ("", ["regex_match", "pattern=("], 2, "regex_match.pattern: not a pattern"),
        ("", ["regex_match", 'pattern="a"', "whole=1"], 2, "regex_match.whole: 1 is not true or false"),
        (
            "",
            ["judge", "url=http://a", "model=m", 'patience={"tries": 0}'],
            2,
            "judge.patience.tries: 0 is not",
        ),
        ("", ["mine.py:mine"], 2, "no such file"),
        ("", ["soft_overlong", "limit=9", "buffer=1"], 2, "tried.jsonl:1: reward soft_overlong asks for"),
        ("", ["smt"], 3, "tried.jsonl:1: reward smt needs column 'declarations'; the row has 'answer'"),
        ('{"answer": "4"}', ["math_answer"], 3, "tried.jsonl:4: 'completion' must be text"),
        ('{"answer": ', ["math_answer"], 3, "tried.jsonl:4: not valid JSON at its end"),
        ("[]", ["math_answer"], 3, "tried.jsonl:4: a line must be an object"),
    ],
)
def test_an_error_names_the_row_or_the_setting(
    file: Path, line: str, words: list[str], code: int, says: str, capsys
) -> None:
    with file.open("a") as whole:
        whole.write(line + "\n")
    assert main(["score", str(file), "--reward", *words]) == code
    said = capsys.readouterr()
    assert says in said.err and said.out == ""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reward_is_found_and_the_program_fails(file: Path, name: str, capsys) -> None:
    source, attack = BAD[name]
    Path("mine.py").write_text(source)
    assert main(["stress", str(file), "--reward", f"mine.py:{name}", "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(attack in finding["attack"] for finding in found)


def test_a_function_that_judges_nothing_does_not_pass(file: Path, capsys) -> None:
    Path("mine.py").write_text("def absent(completion):\n    return None\n")
    assert main(["stress", str(file), "--reward", "mine.py:absent", "--json"]) == 1
    (finding,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (finding["kind"], finding["value"]) == ("unscored", None)


def test_a_line_separator_of_unicode_ends_no_row(file: Path, capsys) -> None:
    file.write_text('\ufeff{"answer": "4", "completion": "\u2028 \\\\boxed{4}"}\n', encoding="utf-8")
    assert main(["score", str(file), "--reward", "math_answer", "rule=boxed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == {"math_answer": 1.0}


def test_a_good_reward_passes(file: Path, capsys) -> None:
    Path("mine.py").write_text(GOOD)
    words = ["--reward", "mine.py:good", "--reward", "math_answer", "--reward", "judge"]
    assert main(["stress", str(file), *words, "url=http://127.0.0.1:9", "model=m"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "0 of " in said.err
    assert "not tested: judge was not attacked: " in said.err


def test_one_that_is_held_by_an_attack_is_a_finding(file: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("covey_verify.stress.SECONDS", 1.0)
    Path("held.py").write_text(
        "def held(completion, answer):\n    while len(completion) > 40_000: pass\n    return 0.0\n"
    )
    main(["stress", str(file), "--reward", "held.py:held", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {f["status"] for f in found if f["attack"].startswith("junk")} == {"timeout"}


def test_every_reward_is_a_name_of_the_package_and_none_loads_torch() -> None:
    assert set(BUILT_IN) <= set(covey_verify.__all__)
    assert all(getattr(covey_verify, name) is not None for name in covey_verify.__all__)
    code = (
        "import sys, covey_verify.__main__, covey_verify.adapters\n"
        "print({'torch', 'transformers', 'pydantic', 'numpy', 'covey'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_page_shows_what_the_program_prints(tmp_path: Path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("tried.jsonl").write_text(next(text for kind, text in blocks if kind == "json"))
    Path("mine.py").write_text(next(text for _, text in blocks if text.startswith("# mine.py")))
    commands = [text.split()[1:] for _, text in blocks if text.startswith("covey-verify ")]
    assert [words[0] for words in commands] == ["score", "stress"]
    shown = [text.splitlines() for kind, text in blocks if not kind]
    for words, lines in zip(commands, shown, strict=True):
        main(words)
        said = capsys.readouterr()
        assert {*lines} - {"..."} <= {*said.out.splitlines(), *said.err.splitlines()}
