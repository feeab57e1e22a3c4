"""The command line, as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli import app, main
from covey.types import VERSION


def test_help_is_light() -> None:
    code = (
        "import sys; from covey.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "train", "eval", "explain", "sample", "score", "algorithms"):
        assert command in done.stdout


def test_help_describes_every_argument() -> None:
    commands = [name for name in app if not name.startswith("-")]
    assert "sample" in commands
    bare = [
        (command, argument.name)
        for command in commands
        for argument in app[command].assemble_argument_collection(parse_docstring=True)
        if argument.show and not argument.parameter.help
    ]
    assert not bare


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == VERSION


def test_unknown_commands_and_missing_arguments_are_usage_errors(capsys) -> None:
    assert main(["trian"]) == 2
    assert main(["train"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_algorithms_lists_all_and_shows_one(capsys) -> None:
    assert main(["algorithms", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["grpo"]["kl"]["coef"] == 0.04
    assert main(["algorithms", "gspo"]) == 0
    shown = capsys.readouterr().out
    assert "2507.18071" in shown
    assert "clip_high: 0.0004" in shown
    assert main(["algorithms", "gsp"]) == 2
    assert "did you mean gspo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train", "error: CONFIG is missing. See covey train --help"),
        ("diff one", "error: B is missing. See covey diff --help"),
        ("pairs", "error: RUN is missing. See covey pairs --help"),
        ("recommend a b", "error: covey recommend takes no 'a b'. See covey recommend --help"),
        *(
            (
                line,
                f'error: Invalid value "{value}" for --max-minutes. Must be > 0. See covey {command} --help',
            )
            for command, line, value in (
                ("demo", "demo --max-minutes -1", "-1.0"),
                ("train", "train run.yaml --max-minutes 0", "0.0"),
                ("sweep", "sweep run.yaml --max-minutes nan", "nan"),
            )
        ),
        (
            "show run x",
            'error: Invalid value for STEP: unable to convert "x" into int. See covey show --help',
        ),
    ],
)
def test_a_command_line_that_does_not_fit_is_one_line(capsys, line: str, says: str) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == says + "\n"
    assert main([*line.split(), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": says.removeprefix("error: "), "exit_code": 2}


def test_errors_are_json_with_json(capsys, tmp_path: Path) -> None:
    assert main(["train", str(tmp_path / "no.yaml"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_explain_lists_the_settings_of_a_reward(capsys) -> None:
    assert main(["explain", "exact_answer"]) == 0
    said = capsys.readouterr().out
    assert "Settings with their defaults: rule ('answer_tag', one of boxed, answer_tag, hash4" in said
    assert "``" not in said
    assert main(["explain", "code_tests"]) == 0
    said = capsys.readouterr().out
    assert "mode ('function', one of function, stdio, check)" in said
    assert "sandbox (" not in said


def test_a_terminal_of_unknown_width_gets_its_help(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["--help"]) == 0
    assert "Usage: covey COMMAND" in capsys.readouterr().out


def test_explain_knows_the_checks_of_the_audit(capsys) -> None:
    assert main(["explain", "sampler_behind"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sampler_behind (a check of covey audit; severe; needs ")
    assert "Convention: " in said
    assert "; with verl: " in said
    assert main(["explain", "no_motion"]) == 0
    said = capsys.readouterr().out
    assert "(a finding" in said
    assert "(a check of covey audit" in said, "a name of both"


def test_score_applies_rewards_to_a_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "done.jsonl"
    file.write_text(
        '{"completion": "so \\\\boxed{1,000}", "answer": "1000"}\n'
        '{"completion": "it is 7", "answer": "7"}\n'
        '{"completion": "\\\\boxed{7}", "answer": "see the figure"}\n'
    )
    assert main(["score", str(file), "math_answer", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["reward"] for r in result["rows"]] == [1.0, 0.0, None]
    assert result["means"]["math_answer"] == 0.5
    assert main(["score", str(file), "math_answer"]) == 0
    assert "mean 0.500 of 3 rows: 1 ok, 1 no_answer, 1 bad_reference" in capsys.readouterr().err
    file.write_text('{"completion": "\\\\boxed{7}", "answer": "see the figure"}\n')
    assert main(["score", str(file), "math_answer", "--json"]) == 1, "no row could be judged"
    assert '"means": {"math_answer": null, "reward": null}' in capsys.readouterr().out, "NaN is not JSON"


def test_score_asks_rewards_as_a_run_of_the_config_does(tmp_path: Path, capsys) -> None:
    (tmp_path / "done.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    (tmp_path / "r.py").write_text(
        "def one(completion, prompt):\n    return float((prompt, completion) == ('Q: 1+1=', '2'))\n\n\n"
        "def all_of_them(completions, prompts):\n    return [float(p == 'Q: 1+1=') for p in prompts]\n"
    )
    (tmp_path / "run.yaml").write_text(
        "model: tiny\ndata: {task: null, train: done.jsonl, template: 'Q: {prompt}', system: Be brief.}\n"
        "rewards: [{'r.py:one': {verdict: true}}, 'r.py:all_of_them']\n"
    )
    assert main(["score", str(tmp_path / "done.jsonl"), str(tmp_path / "run.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["means"] == {"one": 1.0, "all_of_them": 1.0, "reward": 2.0}


def test_a_mistake_in_the_rewards_of_a_config_has_its_line(tmp_path: Path, capsys) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny\ndata: {task: sums}\nrewards: [math_anser]\n")
    for words in (["train"], ["train", "--rewards", "[math_anser]"], ["eval"], ["stress"]):
        assert main([words[0], str(config), *words[1:]]) == 2
        place = "on the command line, --rewards" if words[1:] else f"{config}:3"
        assert f"error: {place}: rewards: 'math_anser' is unknown" in capsys.readouterr().err
    assert main(["stress", str(config), "math_anse"]) == 2
    assert "error: rewards: 'math_anse' is unknown" in capsys.readouterr().err


def test_a_prompt_given_twice_keeps_all_its_completions(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("covey.api.sample", lambda *_, **__: [["a", "b"], ["c"], ["d"]])
    assert main(["sample", "model", "1+1=", "2+2=", "1+1=", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"1+1=": ["a", "b", "d"], "2+2=": ["c"]}


def test_question_and_answer_of_a_chat_are_apart(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """They stood in one line: `What is 6 * 7?6 * 7 is 42.`"""
    monkeypatch.setattr("covey.api.sample", lambda *_, **__: [["It is 42.", " 42\n"]])
    assert main(["sample", "model", "What is 6 * 7?", "--chat", "--system", "Be brief."]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "system: Be brief.",
        "user: What is 6 * 7?",
        "assistant 1 of 2: It is 42.",
        "",
        "assistant 2 of 2: 42",
        "",
    ]
    assert "sampling from model: loading" in told.err
    assert main(["sample", "model", "What is"]) == 0
    assert capsys.readouterr().out == "What isIt is 42.\nWhat is 42\n\n"


def test_score_reads_rows_as_the_config_that_names_the_rewards(tmp_path: Path, capsys) -> None:
    (config := tmp_path / "run.yaml").write_text(
        "model: tiny\noutput: out\nrewards: [{code_tests: {mode: check, form: continue}}]\n"
        "data: {train: tasks.jsonl, prompt: stub, answer: solved, columns: {setup: stub}}\n"
    )
    task = {
        "stub": "def f(x):\n    'Square x.'\n",
        "test": "def check(f):\n    assert f(2) == 4\n",
        "entry_point": "f",
    }
    row = {**task, "solved": "    return 2 * x", "completion": "    return x * x"}
    (file := tmp_path / "done.jsonl").write_text(json.dumps(row))
    assert main(["score", str(file), str(config), "--json"]) == 0
    (scored,) = json.loads(capsys.readouterr().out)["rows"]
    assert scored["rewards"] == {"code_tests": 1.0}, scored["detail"]
    file.write_text(json.dumps({k: v for k, v in row.items() if k != "stub"}))
    assert main(["score", str(file), str(config)]) == 3
    assert "done.jsonl:1: there is no column 'stub', which the config copies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reward", "says"),
    [
        ('{"answer": "1"}', "math_answer", "done.jsonl:1: there is no column 'completion'"),
        ('{"completion": "1"}', "math_answer", "needs column 'answer'"),
        ("{", "math_answer", "done.jsonl:1: not valid JSON"),
        ('{"completion": "1"}', "math_anwser", "did you mean math_answer"),
        ("", "think_format", "no rows"),
    ],
)
def test_score_answers_mistakes(tmp_path: Path, capsys, content: str, reward: str, says: str) -> None:
    file = tmp_path / "done.jsonl"
    file.write_text(content)
    assert main(["score", str(file), reward]) in (2, 3)
    assert says in capsys.readouterr().err


def test_the_copy_of_the_lab_is_told_as_json(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("covey.insight.pages.copy.write_copy", lambda folder: folder / "lab.html")
    assert main(["lab", "--static", 'a "b"', "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": 'a "b"/lab.html'}


def test_help_sorts_the_commands_by_what_somebody_is_about_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    text = capsys.readouterr().out
    titles = ["Train", "Before a run", "Look at runs", "Check rewards", "Use a model", "Learn", "Options"]
    found = [re.escape(title) for title in titles]
    assert re.search(".*".join(rf"\W{title}\W" for title in found), text, re.DOTALL)
    grouped = {name: [g.name for g in app[name].group] for name in app if not name.startswith("-")}
    assert all(len(groups) == 1 and groups[0] in titles[:-1] for groups in grouped.values()), grouped
