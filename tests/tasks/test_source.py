"""Which problems are trained on, and which are kept for measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.config.load import load_config
from covey.tasks.preflight import trained_on
from covey.tasks.source import Source, load_source
from covey.types import Problem
from covey_verify.errors import ConfigError


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
    assert not trained_on(source)


def test_held_out_prompts_that_are_trained_on_are_found() -> None:
    train = [Problem("a:1", "What is  2+2?"), Problem("a:2", "what is 2+2? "), Problem("a:3", "x")]
    test = [Problem("b:1", "What is 2+2?"), Problem("b:2", "What is 2+3?")]
    assert trained_on(Source(train, test)) == {"b:1": "a:1"}


def test_a_number_of_rows_to_generate_is_refused_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text("{model: tiny, data: {train: q.jsonl, train_size: 1}}")
    with pytest.raises(ConfigError, match="data.train_size: .* every row of a file"):
        load_source(load_config(tmp_path / "run.yaml"))
