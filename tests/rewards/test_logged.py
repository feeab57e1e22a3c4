"""TRL's `log_extra`, `log_metric` and `trainer_state`: given however a function asks, kept, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main

TAKES = {
    "in **kwargs": "def f(completions, **kwargs):\n    more = kwargs\n",
    "by name": "def f(completions, log_extra, log_metric, trainer_state):\n    more = locals()\n",
    "one completion": "def f(completion, **kwargs):\n    more, completions = kwargs, [completion]\n",
    "async": "async def f(completions, **kwargs):\n    more = kwargs\n",
}
BODY = """
    values = [float(len(c) + sum(map(ord, c)) % 7) for c in completions]
    more["log_extra"]("length", [f"{len(c)} long" for c in completions])
    more["log_metric"]("state", more["trainer_state"].global_step)
    return VALUE
"""
CONFIG = """
data: {task: last_digit, train_size: 16, test_size: 4}
rewards: ['r.py:f']
rollout: {group_size: 2, prompts_per_step: 2, max_tokens: 4}
train: {steps: 2, lr: 1.0e-3}
eval: {problems: 2, samples: 1}
threads: 1
"""


@pytest.mark.parametrize("place", ["worker", "inline", "process"])
@pytest.mark.parametrize("how", TAKES)
def test_what_a_function_logs_is_kept_and_shown(how: str, place: str, tmp_path: Path, capsys: Any) -> None:
    if (how, place) in [("async", "process"), ("by name", "process"), ("one completion", "inline")]:
        pytest.skip("the same code as another case")
    value = "values[0]" if how == "one completion" else "values"
    body = TAKES[how] + BODY.replace("VALUE", value)
    (tmp_path / "r.py").write_text(f"import covey\n\n@covey.reward(isolate={place!r})\n{body}")
    (tmp_path / "c.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "c.yaml"), "--output", str(run)]) in (0, 1)
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert all(row["extra"] == {"f": {"length": f"{len(row['completion'])} long"}} for row in rows)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["user/state"] for m in metrics] == [0.0, 1.0]
    capsys.readouterr()
    assert main(["show", str(run), "1", "0"]) == 0
    assert f"length '{len(rows[0]['completion'])} long'" in capsys.readouterr().out
