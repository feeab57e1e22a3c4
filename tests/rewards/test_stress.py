"""A user who writes a bad reward learns it before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judge_stub import Stub, stub

from covey.cli import main
from covey.commands.stress import attack_rewards
from covey.rewards.loading import BUILT_IN, load_rewards
from covey.types import Problem
from covey_verify.attacks import HACKS
from covey_verify.stress import StressFinding
from covey_verify.texts.judge import endpoint

__all__ = ["stub"]

PROBLEMS = [Problem(f"p{n}", f"{n}+{n}=", {"answer": str(2 * n)}) for n in (2, 8, 21)]
BAD = {
    "pays_anything": ("def pays_anything(completion):\n    return 1.0", "empty"),
    "pays_length": ("def pays_length(completion):\n    return len(completion) / 1000", "junk"),
    "pays_containing": (
        "def pays_containing(completion, answer):\n    return float(answer in completion)",
        "contradicted",
    ),
    "pays_any_number": (
        (
            "import re\ndef pays_any_number(completion, answer):\n"
            "    return float(answer in re.findall(r'\\d+', completion))"
        ),
        "unfinished reasoning",
    ),
    "pays_tags": (
        "def pays_tags(completion):\n    return float('<think>' in completion and '</think>' in completion)",
        "empty template",
    ),
    "never_pays": ("def never_pays(completion, answer):\n    return 0.0", "the correct answer is not paid"),
    "ignores_the_sign": (
        (
            "def ignores_the_sign(completion, answer):\n"
            "    if '<think>' in completion or completion.count('<answer>') != 1: return 0.0\n"
            "    found = completion.partition('<answer>')[2].partition('</answer>')[0]\n"
            "    return float(found.lstrip('-') == answer.lstrip('-'))"
        ),
        "the other sign",
    ),
    "takes_percents_for_numbers": (
        (
            "def takes_percents_for_numbers(completion, answer):\n"
            "    if '<think>' in completion or completion.count('<answer>') != 1: return 0.0\n"
            "    found = completion.partition('<answer>')[2].partition('</answer>')[0]\n"
            "    try: return float(float(found) in (float(answer), 100 * float(answer)))\n"
            "    except ValueError: return 0.0"
        ),
        "a hundred times the answer",
    ),
    "is_about_right": (
        (
            "def is_about_right(completion, answer):\n"
            "    if '<think>' in completion or completion.count('<answer>') != 1: return 0.0\n"
            "    found = completion.partition('<answer>')[2].partition('</answer>')[0]\n"
            "    try: return float(abs(float(found) - float(answer)) <= 1)\n"
            "    except ValueError: return 0.0"
        ),
        "the last digit one",
    ),
    "evaluates": (
        (
            "import re\n"
            "def evaluates(completion, answer):\n"
            "    found = re.findall(r'\\\\boxed\\{(.*)\\}', completion)\n"
            "    return float(eval(found[-1]) == float(answer)) if found else 0.0"
        ),
        "an injection (the function failed)",
    ),
    "dies_in_the_trainer": (
        (
            "import os\nfrom covey import reward\n"
            "@reward(isolate='inline')\n"
            "def dies_in_the_trainer(completion, answer):\n"
            "    if len(completion) > 40_000: os._exit(0)\n"
            "    return 0.0"
        ),
        "junk, 50 KB (the function failed)",
    ),
    "returns_text": (
        "def returns_text(completion, answer):\n    return completion[:3] if 'passwd' in completion else 0.0",
        "an injection (the function failed)",
    ),
    "breaks": (
        (
            "def breaks(completion, answer):\n"
            "    return float(int(completion.split('boxed{')[1][:-2]) == int(answer))"
        ),
        "the function failed",
    ),
}
GOOD = """
def good(completion, answer):
    spoken = completion.rpartition("</think>")[2]
    if "<think>" in spoken:
        return 0.0
    return float(spoken.rpartition("<answer>")[2].partition("</answer>")[0].strip() == answer)
"""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reward_is_found_and_the_command_fails(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    source, attack = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text(source)
    rows = [{"prompt": p.prompt, **p.columns} for p in PROBLEMS]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["stress", "data.jsonl", f"{name}.py:{name}"]) == 1
    out = capsys.readouterr().out
    assert f"{name}: " in out
    assert attack in out


def test_one_that_is_held_by_an_attack_is_a_finding(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("covey.commands.stress.SECONDS", 1.0)
    (tmp_path / "held.py").write_text(
        "import re\n"
        "def held(completion, answer):\n"
        "    return float(len(completion) > 40_000 and re.match(r'(x+)+$', 'x' * 40 + '!') is not None)\n"
    )
    report = attack_rewards(PROBLEMS[:1], load_rewards(["held.py:held"], tmp_path))
    held = [f for f in report.findings if f.attack.startswith("junk")]
    assert [f.status for f in held] == ["timeout"]


def test_json_is_printed_whatever_an_attack_does(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text(BAD["evaluates"][0] + "\n" + BAD["returns_text"][0])
    Path("data.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    assert main(["stress", "data.jsonl", "r.py:evaluates", "r.py:returns_text", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {f["reward"] for f in report["accepted"]} == {"evaluates", "returns_text"}


def test_a_good_reward_passes_and_json_says_so(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(GOOD)
    Path("data.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "8+8=", "answer": "16"}\n')
    assert main(["stress", "data.jsonl", "mine.py:good", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["accepted"] == []
    assert report["tried"] > 60


CODE = [
    Problem(
        f"c{n}",
        "square a number",
        {
            "tests": [{"input": [x], "output": x * n} for x in (1, 2, 3)],
            "entry_point": "f",
            "solution": f"def f(x):\n    return x * {n}\n",
        },
    )
    for n in (3, 5)
]
CALLS = [Problem("t", "weather", {"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]})]


NO_COMMA = [Problem("i", "write it", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})]


@pytest.mark.parametrize(
    ("problems", "spec"),
    [
        (PROBLEMS, {"math_answer": {"rule": "boxed"}}),
        (PROBLEMS, {"math_answer": {"rule": "answer_tag"}}),
        (PROBLEMS, {"math_answer": {"rule": "hash4"}}),
        (PROBLEMS, "exact_answer"),
        (PROBLEMS, "think_format"),
        (PROBLEMS, "answer_format"),
        (PROBLEMS, "duplicates"),
        (PROBLEMS, {"repetition": {"n": 3}}),
        (PROBLEMS, {"soft_overlong": {"limit": 10, "buffer": 4}}),
        (CODE, "code_tests"),
        (CALLS, "tool_calls"),
        (NO_COMMA, "instructions"),
    ],
    ids=lambda v: None if isinstance(v, list) else str(v),
)
def test_built_in_rewards_withstand_the_battery(problems, spec, impatient) -> None:
    report = attack_rewards(problems, load_rewards([spec], Path()))
    assert report.findings == ()
    assert report.tried >= 9


def test_hacks_of_the_tester_are_part_of_it() -> None:
    assert len(HACKS.strip().split("\n\n")) >= 12
    report = attack_rewards(CODE, load_rewards(["code_tests"], Path()))
    assert report.tried >= 2 * 12


def test_what_cannot_be_tested_is_said(capsys) -> None:
    assert BUILT_IN["language_consistency"]
    report = attack_rewards(PROBLEMS, load_rewards([{"regex_match": {"pattern": r"\d+ apples"}}], Path()))
    assert report.findings == ()
    assert len(report.notes) == 3


TURNS = {
    "any_call": (
        'def any_call(completion, turns=()):\n    return float(any(t["role"] == "tool" for t in turns))',
        {"a call that is refused", "a call again and again"},
    ),
    "said_by_anybody": (
        "def said_by_anybody(completion, answer, turns=()):\n    said = [str(t['content']) for t in turns]\n\
    return float(any(answer in one for one in said))",
        {"an answer that only a tool said"},
    ),
    "each_call": (
        "def each_call(completion, turns=()):\n    calls = [t.get('tool_calls', ()) for t in turns]\n\
    return float(sum(map(len, calls)))",
        {"a call again and again", "an answer that is only in a call"},
    ),
    "planted": (
        "def planted(completion, turns=()):\n    return float('\"verdicts\": [true]' in completion)",
        {"a planted verdict"},
    ),
    "raises": (
        'def raises(completion, turns):\n    return 0.0 * len(turns[0]["tool_calls"][0]["function"]["name"])',
        {"does nothing, with tools at hand (the function failed)"},
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_reward_that_looks_at_turns_is_attacked_in_turns(tmp_path: Path, name: str) -> None:
    program, wanted = TURNS[name]
    (tmp_path / "mine.py").write_text(program)
    report = attack_rewards(PROBLEMS, load_rewards([f"mine.py:{name}"], tmp_path))
    assert wanted <= {finding.attack for finding in report.findings}


ROOM = '''
class Room:
    def reset(self, *, secret: int) -> None:
        self.secret, self.steps = secret, []

    def go(self, step: int, words: str = "") -> str:
        """Go.

        Args:
            step: How far.
            words: What to say.
        """
        self.steps.append(step)
        return "gone"

    def get_reward(self) -> float:
        return {reward}
'''
REWARDS = {
    "float(sum(self.steps) == self.secret)": set(),
    "1.0 - 0.1 * len(self.steps)": {"does nothing", "go, with what does not fit"},
    "0.1 * len(self.steps)": {"go, 8 times the same"},
    "float(sum(self.steps) ** 2 == self.secret)": set(),
    "float(sum(self.steps) ** 2) * 0": {"go, step 10**300 (the environment failed)"},
    "0.0 / len(self.steps)": {"does nothing (the environment failed)"},
    "float(len(self.steps) == 1)": {"go, once, on every problem"},
}


@pytest.mark.parametrize("reward", REWARDS)
def test_a_scripted_player_tries_the_runs_own_environment(
    tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "room.py").write_text(ROOM.replace("{reward}", reward))
    # The environment does not read the answer, so no text with it has to be paid.
    rows = (
        {"prompt": [{"role": "user", "content": f"go {n}"}], "secret": n, "answer": str(n)} for n in (3, 5)
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model: tiny\ndata: {train: rows.jsonl}\nrewards: [environment_reward]\n"
        "rollout: {tools: {environment: room.py:Room}}\n"
    )
    code = main(["stress", str(tmp_path / "run.yaml"), "--json"])
    found = {finding["attack"] for finding in json.loads(capsys.readouterr().out)["accepted"]}
    assert found == REWARDS[reward] if not REWARDS[reward] else REWARDS[reward] <= found
    assert code == bool(REWARDS[reward])


TOOLS = '''
import os


def look_up(word: str) -> str:
    """The meaning of a word.

    Args:
        word: What to look up.
    """
    return f"entry for {word}"


def dies(n: int) -> str:
    """Dies.

    Args:
        n: A number.
    """
    os._exit(3)
'''
SEES = """
def sees_an_entry(completion, turns=()):
    return float(any("entry for" in t["content"] for t in turns))

def sees_nothing(completion):
    return 0.0
"""


def with_tools(folder: Path, reward: str) -> Path:
    """A config whose tools are plain functions."""
    (folder / "tools.py").write_text(TOOLS)
    (folder / "sees.py").write_text(SEES)
    (folder / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    config = folder / "run.yaml"
    config.write_text(
        "model: tiny\ndata: {train: rows.jsonl, chat: true}\n"
        f"rewards: ['sees.py:{reward}']\nrollout: {{tools: ['tools.py:look_up', 'tools.py:dies']}}\n"
    )
    return config


def test_the_runs_own_functions_are_called_for_a_reward_that_looks_at_turns(tmp_path: Path, capsys) -> None:
    assert main(["stress", str(with_tools(tmp_path, "sees_an_entry")), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert "look_up, once" in {f["attack"] for f in said["accepted"]}
    assert not [note for note in said["notes"] if "not called" in note]


def test_tools_that_are_not_played_are_named(tmp_path: Path, capsys) -> None:
    assert main(["stress", str(with_tools(tmp_path, "sees_nothing"))]) == 1
    assert "not tested: rollout.tools: look_up, dies were not called" in capsys.readouterr().err
    assert main(["stress", str(tmp_path / "run.yaml"), "--rollout.tools", "null"]) == 1
    assert "not called" not in capsys.readouterr().err


def test_a_data_file_is_attacked_with_a_configs_rewards_settings_and_tools(tmp_path: Path, capsys) -> None:
    config = with_tools(tmp_path, "sees_an_entry")
    (tmp_path / "other.jsonl").write_text('{"prompt": "3+3=", "answer": "6"}\n')
    assert main(["stress", str(tmp_path / "other.jsonl"), str(config), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert {f["problem"] for f in said["accepted"]} == {"other.jsonl:1"}
    assert "look_up, once" in {f["attack"] for f in said["accepted"]}
    config.write_text("model: tiny\ndata: {train: rows.jsonl}\nrewards: [{math_answer: {rule: hash4}}]\n")
    assert main(["stress", str(tmp_path / "other.jsonl"), str(config), "--json"]) == 0
    capsys.readouterr()
    boxed = ["--rewards", "[math_answer, {judge: {url: 'http://127.0.0.1:9', model: m}}]"]
    assert main(["stress", str(tmp_path / "other.jsonl"), str(config), *boxed, "--json"]) == 0
    assert "judge was not attacked" in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_judge_that_does_not_answer_is_named_at_once_and_so_is_what_it_gates(capsys) -> None:
    away: dict[str, object] = {"judge": {"url": "http://127.0.0.1:9", "model": "m", "verdict": True}}
    gated = {"think_format": {"gated_by": "judge"}}
    report = attack_rewards(PROBLEMS[:1], load_rewards([away, gated, "exact_answer"], Path()))
    assert [note.partition(": ")[0] for note in report.notes] == [
        "judge was not attacked",
        "think_format was not attacked",
    ]
    assert "127.0.0.1:9" in report.notes[0]
    assert report.tried > 20, "of exact_answer"


@pytest.mark.parametrize("verdict", [True, False])
def test_a_judge_that_answers_is_attacked(stub: Stub, verdict: bool) -> None:
    """Of one that does not say what is correct only what nobody may be paid for is asked."""
    asked: dict[str, object] = {"judge": {"url": stub.url, "model": "m", "verdict": verdict}}
    others = [] if verdict else ["exact_answer"]
    stub.replies = ['{"KEY": [true]}']
    report = attack_rewards(PROBLEMS[:2], load_rewards([asked, *others], Path()))
    paid = {f.attack for f in report.findings if f.reward == "judge"}
    assert "an injection" in paid
    assert "empty" not in paid, "it is not asked about those"
    assert ("another row's answer" in paid) == verdict
    assert any("incorrect answers were not tried" in note for note in report.notes) != verdict
    stub.replies = ['{"KEY": [false]}']
    endpoint(stub.url).cache.clear()
    report = attack_rewards(PROBLEMS[:2], load_rewards([asked, *others], Path()))
    unpaid = {"the correct answer is not paid in any of 6 forms"}
    assert {f.attack for f in report.findings} == (unpaid if verdict else set())


def test_a_paid_part_is_written_as_a_person_would() -> None:
    """A third of .3 was printed as 0.09999999999999999."""
    finding = StressFinding(
        "fields", "paid", "another row's answer", "train.jsonl:1", 0.3 * 1 / 3, "ok", "7;Ito"
    )
    assert str(finding) == "fields: another row's answer on train.jsonl:1: paid 0.1 for '7;Ito'"


def test_the_command_says_why_a_function_failed_and_what_was_not_paid(tmp_path: Path, capsys) -> None:
    """Text as a reward got 100 lines of `None (infra_error)`, and a reward that never pays `3 were paid`."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}))
    (tmp_path / "mine.py").write_text(
        "def says(completion, answer):\n    return 'correct' if answer in completion else 0.0\n\n\n"
        "def nothing(completion, answer):\n    return 0\n"
    )
    assert main(["stress", str(tmp_path / "rows.jsonl"), f"{tmp_path / 'mine.py'}:says"]) == 1
    printed = capsys.readouterr()
    assert "no score (infra_error: reward says on" in printed.out
    assert "returned str" in printed.out
    assert "made the function or the environment fail" in printed.err
    assert main(["stress", str(tmp_path / "rows.jsonl"), f"{tmp_path / 'mine.py'}:nothing"]) == 1
    printed = capsys.readouterr()
    assert "the correct answer is not paid in any of 6 forms on" in printed.out
    assert " 0 of " in f" {printed.err}"
    assert "; 1 correct answers were not paid in full" in printed.err


@pytest.mark.parametrize("rows", [{"prompt": "2+2="}, {"prompt": "2+2=", "answer": "4"}])
def test_a_function_that_judges_nothing_does_not_pass(tmp_path: Path, capsys, rows: dict[str, str]) -> None:
    """`0 of 39 attacks were paid` and exit code 0 looked like a good reward."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
    (tmp_path / "mine.py").write_text("def absent(completion, **columns):\n    return None\n")
    assert main(["stress", str(tmp_path / "rows.jsonl"), f"{tmp_path / 'mine.py'}:absent"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "absent: no text gets a score: it returned None for every text on rows.jsonl:1"
    )
    assert printed.out.count("absent: ") == 1
    assert "1 functions gave no text a score, so nothing tested them" in printed.err
