"""Which problems are trained on, and which are kept for measuring."""

from __future__ import annotations

import json
from pathlib import Path

from covey.config.load import load_config
from covey.system.console import RunConsole
from covey.tasks.preflight import find_leaks
from covey.tasks.source import Source, load_source
from covey.training.options import RunOptions
from covey.training.task import checked_task
from covey.types import Problem


def test_all_pairs_of_a_prompt_are_held_out_or_none(tmp_path: Path) -> None:
    """Two pairs of one prompt, one on each side, would measure what was learned by heart."""
    rows = [
        {"prompt": f"Q{n}? ", "chosen": f"yes {again}", "rejected": "no"}
        for n in range(10)
        for again in "abcd"
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"{{model: tiny, method: dpo, data: {{train: {pairs}, held_out: 0.25}}, output: {tmp_path / 'out'}}}"
    )
    source = load_source(load_config(config))
    assert (len(source.examples), len(source.held_out)) == (32, 8)  # two prompts of four pairs
    assert not find_leaks(source)


def test_held_out_prompts_that_are_trained_on_are_found() -> None:
    train = [Problem("a:1", "What is  2+2?"), Problem("a:2", "what is 2+2? "), Problem("a:3", "x")]
    test = [Problem("b:1", "What is 2+2?"), Problem("b:2", "What is 2+3?")]
    assert find_leaks(Source(train, test)) == {"b:1": "a:1"}


def test_what_a_setting_does_not_do_is_said_before_a_run(tmp_path: Path, capsys) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "r.py").write_text(
        "def right(completion, answer): return completion == answer\n\n\n"
        "def brief(completion): return len(completion) < 9\n"
    )
    gate = "{'r.py:right': {verdict: true}}, {'r.py:brief': {gated_by: right}}"
    (tmp_path / "run.yaml").write_text(
        f"{{model: tiny, data: {{train: q.jsonl, train_size: 1}}, rewards: [{gate}]}}"
    )
    checked_task(load_config(tmp_path / "run.yaml"), RunConsole(), RunOptions())
    said = capsys.readouterr().out
    assert "data.train_size is for generated tasks" in said
    assert "brief counts wherever right gives a number, also 0; for correct answers only: gated_by:" in said
