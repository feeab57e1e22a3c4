"""After a run: show, diff, rescore, report, score; and that no completion acts on a terminal or a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from covey.cli import main
from covey.commands.demonstration import demonstrate
from covey.insight import difference
from covey.insight.rescore import RescoredGroup
from covey.runs.estimates import paired_bootstrap
from covey.runs.folder import WRITTEN
from covey.runs.rollouts import read_rollouts
from covey.system.console import RunConsole
from covey.system.integrity import sealed, unsealed
from covey.system.text import escape_controls
from tests.fakes import as_stream, rewrite_rollouts, rows_of
from tests.training.runs import start

HOSTILE = "<script>alert(1)</script>\x1b[2J\x9b31m\u202eabc\r\n  | faked\x07"
BREAKS = "\x0b \x0c \x1c \x1d \x1e \x85 \u2028 \u2029 \r"
"""Characters at which Python breaks lines, and a terminal or a page may."""


def by_digits(completion: str) -> float:
    return sum(map(ord, completion)) % 5 / 4


FRONTIER = {"curriculum": "frontier"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same problems with different learning rates."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("a", 1e-3), ("b", 1e-2)):
        start(folder / name, rewards=(by_digits,), train={"steps": 3, "lr": lr}, rollout=FRONTIER)
    return folder / "a", folder / "b"


def out(capsys, *words: object) -> str:
    assert main([str(w) for w in words]) == 0
    return capsys.readouterr().out


def test_show_a_run_a_step_a_group(runs, capsys) -> None:
    text = out(capsys, "show", runs[0])
    assert "3 of 3 steps" in text
    assert "held-out accuracy" in text
    assert re.search(r"^ +1 +\d", text, re.MULTILINE)
    text = out(capsys, "show", runs[0], 1)
    assert "prompt" in text
    rows = json.loads(out(capsys, "show", runs[0], 1, "--json"))["groups"]
    spreads = [r["spread"] for r in rows]
    assert spreads == sorted(spreads, reverse=True)
    text = out(capsys, "show", runs[0], 1, 0)
    log = read_rollouts(runs[0], 1)
    for place in log.groups[0]:
        assert f"{log.rows[place]['advantage']:+.3g}" in text
        for line in log.rows[place]["completion"].split("\n"):
            assert f"  | {escape_controls(line)}" in text


def test_show_repeats_what_the_run_has_found(runs, capsys) -> None:
    record = {
        "id": "dead",
        "step": 2,
        "severity": "note",
        "sentence": "75 % tie",
        "remedy": "rollout.group_size: 16",
        "advice": "",
    }
    (runs[0] / "findings.jsonl").write_text(as_stream([record]))
    assert "step 2: 75 % tie. Try: rollout.group_size: 16" in out(capsys, "show", runs[0])
    (runs[0] / "findings.jsonl").unlink()


def test_the_demo_ends_with_what_the_model_writes_before_and_after(tmp_path: Path, capsys) -> None:
    stages = [{"method": "sft", "train": {"steps": 2}}, {"train": {"steps": 2}}]
    start(tmp_path / "demo", rewards=(by_digits,), stages=stages)
    demonstrate(tmp_path / "demo", RunConsole())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the first 3 held-out problems")
    answers = lines[1:]
    assert len(answers) == 6
    assert [a[13:19] for a in answers] == ["before", "after "] * 3
    assert all(a.endswith(("  correct", "  incorrect")) for a in answers)
    assert all("·" in a for a in answers)
    assert "before it: covey show" in out(capsys, "show", tmp_path / "demo")


def test_before_a_run_without_stages_is_the_model_that_it_began_with(tmp_path: Path, capsys) -> None:
    start(tmp_path / "first", rewards=(by_digits,), train={"steps": 2})
    settings = {"model": str(tmp_path / "first/final"), "train": {"steps": 2, "lr": 0.1}}
    start(tmp_path / "second", rewards=(by_digits,), **settings)
    answers = {}
    for name in ("first", "second"):
        capsys.readouterr()
        demonstrate(tmp_path / name, RunConsole())
        answers[name] = [line[20:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert answers["second"][0::2] == answers["first"][1::2]
    assert answers["second"][0::2] != answers["second"][1::2]


def test_a_run_that_is_taken_for_a_model_is_answered_with_its_model(runs, capsys) -> None:
    assert main(["sample", str(runs[0]), "1+1="]) == 2
    assert f"did you mean {runs[0] / 'final'}?" in capsys.readouterr().err


def test_what_is_not_there_is_said(runs, tmp_path: Path, capsys) -> None:
    for words in (
        ["sample", runs[0] / "final", "1+1=", "--max-tokens", 0],
        ["sample", runs[0] / "final", "1+1=", "--n", 0],
        ["sample", runs[0] / "final", ""],
        ["sample", runs[0] / "final"],
        ["sample", runs[0] / "final", "1+1=", "--temperature", "nan"],
        ["sample", runs[0] / "final", "1+1=", "--max-tokens", 10**9],
        ["serve", runs[0] / "final", "--port", 99999],
        ["pairs", runs[0], "-o", tmp_path / "pairs.jsonl", "--margin", "nan"],
        ["pairs", runs[0], "-o", tmp_path],
        ["show", runs[0], 9],
        ["show", runs[0], 1, 99],
        ["show", tmp_path],
        ["diff", runs[0], tmp_path],
    ):
        assert main([str(w) for w in words]) == 2
        assert capsys.readouterr().err.count("error: ") == 1


def test_diff_names_the_setting_and_pairs_the_problems(runs, capsys) -> None:
    found = json.loads(out(capsys, "diff", *runs, "--json"))
    assert found["settings"] == {"train.lr": [1e-3, 1e-2]}
    assert set(found["held_out"]) == {"greedy", "sampled", "reward"}
    same = json.loads(out(capsys, "diff", runs[0], runs[0], "--json"))
    assert same["settings"] == {}
    assert same["held_out"]["reward"]["value"] == 0
    assert same["held_out"]["reward"]["low"] < 0 < same["held_out"]["reward"]["high"]
    assert "train.lr: 0.001 -> 0.01" in out(capsys, "diff", *runs)


def test_diff_does_not_compare_different_problems(runs, tmp_path: Path, capsys) -> None:
    start(tmp_path / "c", rewards=(by_digits,), eval={"problems": 4}, train={"steps": 1})
    assert "4 held-out problems that both measured" in out(capsys, "diff", runs[0], tmp_path / "c")
    evals = tmp_path / "c" / "evals.jsonl"
    records = rows_of(evals)
    for record in records:
        record["basis"]["problems"] = [f"another {n}" for n in range(4)]
    evals.write_text(as_stream(records))
    result = tmp_path / "c" / "result.json"
    ended = {name: value for name, value in unsealed(result.read_bytes()).items() if name != WRITTEN}
    result.write_text(sealed(ended))
    assert "have none in common: not compared" in out(capsys, "diff", runs[0], tmp_path / "c")


def test_diff_says_what_was_read_that_is_not_the_same(runs, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "training reward" in out(capsys, "diff", *runs)
    monkeypatch.setattr(difference, "read_environment", lambda stage: {"files": {"mine.py": stage.name}})
    text = out(capsys, "diff", *runs)
    assert "mine.py: changed" in text
    assert "training rewards are not compared: mine.py differs" in text, "it may pay for other things"
    assert "both met late" not in text


def test_labels_that_a_run_has_flipped_are_no_change_of_rewards(runs, tmp_path: Path, capsys) -> None:
    noisy = tmp_path / "noisy"
    settings = {"rewards": (by_digits,), "rollout": FRONTIER, "train": {"steps": 3, "lr": 1e-3}}
    start(noisy, scoring={"noise": 0.5}, **settings)
    found = json.loads(out(capsys, "diff", runs[0], noisy, "--json"))
    assert found["settings"] == {"scoring.noise": [0.0, 0.5]}
    assert found["training"] is None
    assert found["training_note"].startswith("training rewards are not compared: scoring.noise")
    assert json.loads(out(capsys, "diff", *runs, "--json"))["training_note"] == ""
    assert "the run has flipped 50 % of its labels (scoring.noise)" in out(capsys, "rescore", noisy, noisy)


def test_paired_bootstrap_finds_a_shift_and_not_noise() -> None:
    rng = np.random.default_rng(1)
    base = rng.random(200)
    moved = paired_bootstrap(base, base + 0.2 + 0.05 * rng.standard_normal(200))
    assert moved.low < 0.2 < moved.high
    assert moved.low > 0.15
    still = paired_bootstrap(base, base + 0.1 * rng.standard_normal(200))
    assert still.low < 0 < still.high
    assert paired_bootstrap(np.ones(3), np.ones(3)).value == 0
    assert np.isnan(paired_bootstrap(np.array([np.nan]), np.array([1.0])).value)


def test_rescore_says_which_groups_change_sign(runs, tmp_path: Path, capsys) -> None:
    (tmp_path / "new.py").write_text(
        "def opposite(completion):\n    return -(sum(map(ord, completion)) % 5) / 4\n\n"
        "def _helper(completion):\n    return 0.0\n\n\ndef other(x):\n    return x\n"
    )
    found = json.loads(out(capsys, "rescore", runs[0], tmp_path / "new.py", "--json"))
    assert found["groups"] == sum(len(read_rollouts(runs[0], step).groups) for step in range(1, 4))
    for row in found["of_groups"]:
        old, new = np.array(row["old"]), np.array(row["new"])
        if row["change"] == "changes sign":
            assert ((old - old.mean()) * (new - new.mean()) < -1e-9).any()
    assert found["changes"].get("changes sign", 0) > 0
    again = json.loads(out(capsys, "rescore", runs[0], runs[0], "--json"))
    assert set(again["changes"]) <= {"same", "stays dead"}
    assert "covey show" in out(capsys, "rescore", runs[0], f"{tmp_path / 'new.py'}:opposite")
    # The rule is a setting of the reward, and the one by default looks for a form that nobody wrote.
    assert "math_answer: 100 % no_answer" in out(capsys, "rescore", runs[0], "math_answer")


def test_a_run_that_credits_steps_is_rescored_by_their_sum(tmp_path: Path, capsys) -> None:
    steps = "def r(completion):\n    first = (0, 1, float(sum(map(ord, completion)) % 5))\n"
    steps += "    return Score(sum(map(ord, completion)) % 3 / 2, steps=(first,))\n"
    (tmp_path / "r.py").write_text(f"from covey_verify.types import Score\n\n\n{steps}")
    algorithm = {"name": "grpo_process", "kl": None}
    rewards = (f"{tmp_path / 'r.py'}:r",)
    start(tmp_path / "run", algorithm=algorithm, rewards=rewards, train={"steps": 1})
    found = json.loads(out(capsys, "rescore", tmp_path / "run", tmp_path / "run", "--json"))
    assert all(row["old"] == row["new"] for row in found["of_groups"])
    # Under another algorithm the same reward is another number.
    plain = {"name": "grpo", "kl": None}
    start(tmp_path / "plain", algorithm=plain, rewards=rewards, train={"steps": 1})
    text = out(capsys, "diff", tmp_path / "run", tmp_path / "plain")
    assert "training rewards are not compared: " in text


def test_completions_are_not_scored_with_other_rows(tmp_path: Path, capsys) -> None:
    asked = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (file := tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    start(tmp_path / "run", rewards=(by_digits,), data={"task": None, "train": str(file)}, train={"steps": 1})
    assert json.loads(out(capsys, "rescore", tmp_path / "run", "math_answer", "--json"))["groups"] == 4
    file.write_text("".join(json.dumps(row) + "\n" for row in reversed(asked)))
    assert main(["rescore", str(tmp_path / "run"), "math_answer"]) == 3
    assert "has another prompt. Put the data back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "change", "flips"),
    [
        ([1, 0], [0, 1], "changes sign", 2),
        ([1, 0, 0], [2, 0, 0], "same", 0),
        ([1, 0], [1, 1], "dies", 0),
        ([0.7, 0.7, 0.7], [0, 0, 1], "comes alive", 0),
        ([1, 1], [0, np.nan], "stays dead", 0),
    ],
)
def test_a_rescored_group_names_its_change_and_flipped_verdicts(old, new, change: str, flips: int) -> None:
    found = RescoredGroup(0, 0, "p", np.array(old, dtype=float), np.array(new, dtype=float), {})
    assert (found.change, found.flips) == (change, flips)


def test_a_completion_does_nothing_to_terminal_or_page(runs, tmp_path: Path, capsys) -> None:
    path = next((runs[1] / "rollouts").glob("*1.jsonl"))
    rows = rows_of(path)
    for row in rows:
        row |= {"completion": HOSTILE, "prompt": HOSTILE}
    rewrite_rollouts(runs[1], 1, rows)
    texts = [out(capsys, "show", runs[1], 1), out(capsys, "show", runs[1], 1, 0)]
    texts.append(out(capsys, "show", runs[1], 1, 0, "--json"))
    assert json.loads(texts[-1])["completions"][0]["completion"] == HOSTILE
    out(capsys, "report", runs[1], "-o", tmp_path / "r.html")
    texts.append((tmp_path / "r.html").read_text())
    for text in texts:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "\n  | faked" not in texts[1].replace("\n  |   | faked", "")
    assert "<script>alert" not in texts[-1]
    assert "\\u003cscript>alert" in texts[-1]
    rows = [{"completion": HOSTILE, "answer": "1", "prompt": "p"}]
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "\x1b" not in out(capsys, "score", tmp_path / "c.jsonl", "math_answer")


ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def quote_it(completion: str) -> float:
    raise ValueError(completion)


def test_no_command_lets_a_completion_break_or_colour_a_line(runs, tmp_path: Path, capfd) -> None:
    """Each break would begin a line without the bar; the others would recolour it or reverse its letters."""
    marks = [*BREAKS.split(" "), *"\x1b\x9b\u061c\u200f\u202e\u2066"]
    text = "".join(f"a{mark}faked" for mark in marks)
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    rows = rows_of(run / "rollouts/step_000002.jsonl")
    for row in rows:
        row |= {"completion": text, "prompt": text, "extracted": {"by_digits": text}}
    rewrite_rollouts(run, 2, rows)
    scored = tmp_path / "texts.jsonl"
    scored.write_text(as_stream([{"completion": text, "answer": "1"}]))
    raises = f"{__file__}:quote_it"
    commands = [("show", run, 2), ("show", run, 2, 0), ("explain", run), ("diff", runs[1], run)]
    commands += [("rescore", run, raises), ("score", scored, "math_answer"), ("score", scored, raises)]
    outputs = []
    for command in commands:
        main([str(word) for word in command])
        outputs.append("".join(capfd.readouterr()))
        assert not ACTS.search(outputs[-1]), command
        assert not re.search("^faked", outputs[-1], re.MULTILINE), command
    completions = [line for line in outputs[1].split("\n") if line.startswith("  | ")]
    assert completions == ["  | " + escape_controls(text)] * sum(row["group"] == 0 for row in rows)
    assert "ValueError: a\\x0bfaked" in outputs[-1]


def test_no_command_that_only_reads_a_run_waits_for_torch(runs) -> None:
    """`covey diff` did: its seconds of import were most of its time."""
    a, b = map(str, runs)
    code = "import sys; from covey.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for command in (["diff", a, b], ["show", a, "1"], ["explain", a], ["verify", a]):
        ended = subprocess.run([sys.executable, "-c", code, *command], capture_output=True)
        assert (ended.returncode, ended.stderr) == (0, b""), command


def test_score_takes_a_config_with_its_settings(tmp_path: Path, capsys) -> None:
    (tmp_path / "done.jsonl").write_text(
        '{"completion": "<think>7</think><answer>7</answer>", "answer": "7"}\n'
        '{"completion": "7", "answer": "7"}\n'
    )
    (tmp_path / "run.yaml").write_text(
        "data: {task: last_digit}\n"
        "rewards:\n  - math_answer: {rule: answer_tag, weight: 2.0}\n"
        "  - answer_format: {weight: 0.5, gated_by: math_answer}\n"
    )
    found = json.loads(out(capsys, "score", tmp_path / "done.jsonl", tmp_path / "run.yaml", "--json"))
    assert [r["reward"] for r in found["rows"]] == [2.5, 0.0]
    assert found["means"]["reward"] == 1.25
    alone = json.loads(out(capsys, "score", tmp_path / "done.jsonl", "math_answer", "--json"))
    assert [r["reward"] for r in alone["rows"]] == [0.0, 0.0]  # without a setting it reads \\boxed{}
    both = [str(tmp_path / "done.jsonl"), str(tmp_path / "run.yaml"), "math_answer"]
    assert main(["score", *both]) == 2
    assert main(["score", str(tmp_path / "done.jsonl"), "math_answer", "--scoring.timeout", "5"]) == 2
    out(capsys, "score", tmp_path / "done.jsonl", tmp_path / "run.yaml", "--scoring.timeout", "5")


def test_inert_spells_out_what_would_act() -> None:
    assert escape_controls("a\tb\nc é 文") == "a\tb\nc é 文"
    assert escape_controls("\x1b[31m\u202e\x9b") == "\\x1b[31m\\u202e\\x9b"
    assert escape_controls("4\u200b2 a\u200db \ufeff\U000e0041") == "4\\u200b2 a\\u200db \\ufeff\\U000e0041"
    assert escape_controls("می\u200cخواهم 👩\u200d🎓") == "می\u200cخواهم 👩\u200d🎓", (
        "these scripts need joiners"
    )
