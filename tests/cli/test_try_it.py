"""The line that invites to try a model, and the card's example: pasted as they are, they send what was
trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.models.chat_models import WITH_TOOLS, model_with
from tests.training.runs import start

from covey.cli import main
from covey.insight.sample_command import example_of, sample_command
from covey.types import Problem

NASTY = [
    'Janet\'s eggs cost $2 per dozen, `ls`; 100 % "sure"!',
    "two\nlines\tand 'quotes' $HOME\\n !! é \x07",
    "-3 + 4 = ",
    "--seed",
    "",
    "~/x *.py {a,b} #no & | > <",
]
SHOW = "import sys, json; print(json.dumps(sys.argv[1:]))"


def said(line: str, shell: str = "bash") -> list[str]:
    """The arguments a program gets when the line is given to a shell."""
    program = f"covey() {{ {sys.executable} -c '{SHOW}' \"$@\"; }}\n{line}"
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("text", NASTY)
def test_a_prompt_survives_the_shell(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    assert said(sample_command(folder, text, {}))[1] == str(folder)
    assert said(sample_command(folder, text, {}))[-1] == text
    chat = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    words = said(sample_command(folder, chat, {"x": [text]}))
    assert words[-1] == text
    if text:
        assert f"--system={text}" in words
    assert json.loads(words[[w.partition("=")[0] for w in words].index("--chat-template-kwargs")][23:]) == {
        "x": [text]
    }


def test_covey_takes_the_line(tmp_path: Path, capsys, monkeypatch) -> None:
    """What the shell makes of it reaches the model: the command's own words are not taken for options."""
    asked = []
    monkeypatch.setattr("covey.api.sample", lambda *a, **settings: asked.append((a, settings)) or [["x"]])
    for text in filter(None, NASTY):
        chat = [{"role": "system", "content": text}, {"role": "user", "content": text}]
        assert main(said(sample_command(tmp_path, chat, {"enable_thinking": False}))) == 0
        (model, prompts), settings = asked[-1]
        assert (model, prompts, settings["system"]) == (str(tmp_path), (text,), text)
        assert settings["chat_template_kwargs"] == {"enable_thinking": False}


def test_an_example_is_one_that_can_be_shown() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    hard = [Problem("1", "a\nb"), Problem("2", [*turns, *turns]), Problem("3", "x" * 500)]
    assert example_of([*hard, Problem("4", "1+1=")]).id == "4"
    assert example_of(hard).id == "1"
    assert (
        example_of([Problem("1", [{"role": "user", "content": [{"type": "text", "text": "hi"}]}])]).id == "1"
    )


def test_a_chat_run_prints_and_describes_what_it_was_trained_on(tmp_path: Path, capfd) -> None:
    base = model_with(tmp_path / "base", WITH_TOOLS)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "It's $2!"}) + "\n")
    (tmp_path / "rewards.py").write_text(
        "def varied(completion):\n    return float(sum(map(ord, str(completion))))\n"
    )
    data = {"train": "rows.jsonl", "chat": True, "system": "Be brief"}
    data["chat_template_kwargs"] = {"enable_thinking": False}
    run = tmp_path / "run"
    settings = {"model": "base", "data": data, "rewards": ["rewards.py:varied"], "output": str(run)}
    small = {"rollout": {"group_size": 2, "prompts_per_step": 1, "max_tokens": 4}, "train": {"steps": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, **small, "threads": 1}))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    line = capfd.readouterr().out.partition("try it  ")[2].partition("\nsee it  ")[0].strip()
    expected = ["sample", str(run / "final"), "--chat", "--system=Be brief"]
    assert said(line) == [*expected, '--chat-template-kwargs={"enable_thinking": false}', "It's $2!"]
    card = (run / "final" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in head  # of a folder no hub knows
    assert str(tmp_path) not in card and "from `../base`" in card
    assert head["license"] == "apache-2.0"
    assert head["datasets"] == ["rows.jsonl"]
    assert ", 1 step, seed" in card
    assert head["pipeline_tag"] == "text-generation"
    snippet = card.partition("```python\n")[2].partition("```")[0]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    snippet += "\nprint(tokenizer.decode(inputs['input_ids'][0]))"
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=run, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "user\nIt's $2!<|im_end|>\nno<|im_start|>assistant\n" in done.stdout.replace(
        "<|im_start|>user", "user"
    )


def test_cards_of_adapters_and_of_later_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    base = model_with(tmp_path / "models--some--base" / "snapshots" / "1", WITH_TOOLS)
    start(tmp_path / "one", model=str(base), lora={"rank": 2})
    start(tmp_path / "two", model=str(tmp_path / "one" / "final"), lora={"rank": 2})
    for run, own in (("one", "some/base"), ("two", "../one/final")):
        final = tmp_path / run / "final"
        head = yaml.safe_load((final / "README.md").read_text().split("---")[1])
        assert head["base_model"] == "some/base"
        card = (final / "adapter" / "README.md").read_text()
        named = json.loads((final / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == own, "not a folder of this machine"
        assert str(tmp_path) not in card + (final / "README.md").read_text() and f"from `{own}`" in card
        snippet = card.partition("```python\n")[2].partition("```")[0].replace("some/base", str(base))
        monkeypatch.chdir(tmp_path / run)
        exec(compile(snippet, "card", "exec"), {})
