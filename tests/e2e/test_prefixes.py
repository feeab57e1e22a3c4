"""An example: what a critic, a prefix tree, a judge of sentences and GRPO say of every token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^ *(?:'.*'|\".*\")((?: +-?[\d.]+){6})$", re.MULTILINE)


@pytest.mark.slow
def test_only_grpo_blames_the_beginning_that_all_answers_share(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/prefixes.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.partition("refuses: reward 1")[2].partition("commits: reward 0")
    safe, unsafe = ([[float(x) for x in m[1].split()] for m in ROW.finditer(part)] for part in said[::2])
    assert min(len(safe), len(unsafe)) > 15
    # Critic's value, its advantage, the tree's two, the sentences' advantage, GRPO's, at every token.
    assert safe[0][0] == unsafe[0][0], "nothing is known yet that tells them apart"
    assert safe[-1][0] > 0.6 and unsafe[-1][0] < 0.4
    assert (safe[-1][2], unsafe[-1][2]) == (1, 0)
    for column in (3, 4):
        assert max(abs(row[column]) for row in (*safe[:3], *unsafe[:3])) < 0.1
    assert all(row[5] > 0.5 for row in safe) and all(row[5] < -0.5 for row in unsafe)
    assert min(row[4] for row in unsafe) < -1 and max(row[4] for row in safe) > 1
    drawn = (tmp_path / "runs/prefixes.svg").read_text()
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == len(safe) + len(unsafe)
