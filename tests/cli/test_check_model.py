"""`covey check MODEL`: what a chat template does, in words and as JSON, without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.templates import CHANNELS, NONE, OPEN, SWITCHED, tokenizer_with

from covey.cli import main


def said(folder: Path, template: str, capsys: pytest.CaptureFixture[str]) -> str:
    tokenizer_with(template).save_pretrained(folder)
    assert main(["check", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (OPEN, "the prompt opens them"),
        (OPEN, "an answer without thoughts begins '</think>'"),
        (NONE, "not shown by the template"),
        (SWITCHED, 'closes an empty pair; the model thinks under {"enable_thinking": true}'),
        (CHANNELS, "<|channel|>analysis<|message|> ... <|end|>: the model opens them"),
        (OPEN + "{{ strftime_now('%Y') }}", "in a run, its first day"),
        (
            OPEN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
            "2 end tokens follow the last answer",
        ),
        ("{{ raise_exception('never') }}", "refused"),
    ],
)
def test_facts_are_told(tmp_path: Path, capsys, template: str, says: str) -> None:
    assert says in said(tmp_path, template, capsys)


def test_facts_are_json_too(tmp_path: Path, capsys) -> None:
    tokenizer_with(OPEN).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turn_end"] == "<|im_end|>"
    assert found["roles"]["tool"] == "read"


def test_a_damaged_tokenizer_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert main(["check", str(tmp_path)]) == 2
    assert "its tokenizer cannot be read" in capsys.readouterr().err
