"""`covey explain NAME`: settings, metrics, functions of the algorithm, findings, names of TRL's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from covey.cli import main
from covey.cli.settings import entry_lines, find_entries, loss_rows
from covey.config import trl
from covey.config.algorithm import algorithm_keys, algorithm_rows, rows_of
from covey.config.rows import SettingRow, key_paths, schema_rows
from covey.insight.findings.table import RULES
from covey.objective.algorithms import PRESETS
from covey.objective.axes import AXES
from covey.rewards.loading import BUILT_IN

DOCS = Path(__file__).parents[2] / "docs"


def test_settings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rollout.group_size"]) == 0
    says = "rollout.group_size (default: 8; >= 1 <= 65536; usual: 4 to 64; 8 or 16 in most papers; "
    says += "in TRL: num_generations; "
    said = capsys.readouterr().out
    assert said.startswith(f"{says}source: 64 in DeepSeekMath")
    assert "): Completions per prompt" in said
    assert main(["explain", "--json"]) == 0
    assert [s["setting"] for s in json.loads(capsys.readouterr().out)] == key_paths()
    assert main(["explain", "loss.beta"]) == 0
    assert "loss.beta (a setting of dpo; default: 0.1; > 0): Factor of the margin" in capsys.readouterr().out
    assert main(["explain", "train.lrr"]) == 2
    assert "did you mean train.lr" in capsys.readouterr().err


@pytest.mark.parametrize("key", algorithm_keys())
def test_every_key_of_the_algorithm_is_explained(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 0
    assert capsys.readouterr().out.startswith(f"{key} (")


def undescribed(rows: Iterable[SettingRow]) -> list[str]:
    """Settings that say nothing of themselves: by function and parameter, or by key."""
    names = (f"{row.owner}.{row.key.rpartition('.')[2]}" if row.owner else row.key for row in rows)
    return [name for name, row in zip(names, rows, strict=True) if not row.setting.effect]


def test_every_setting_describes_itself() -> None:
    """A new one needs its sentence where it is defined: `Annotated[float, Setting("...")]`."""
    silent = undescribed([*schema_rows(), *algorithm_rows(), *loss_rows()])
    assert not silent, f"these have no Setting: {', '.join(silent)}"


def plain_margin(rewards: object, *, margin: float = 0.25) -> object:
    """Rewards above a margin."""
    return rewards


def test_a_setting_without_a_description_is_named() -> None:
    assert undescribed(list(rows_of(plain_margin, "algorithm.advantage"))) == ["plain_margin.margin"]


def test_a_function_of_the_user_is_explained_though_it_describes_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def best(rewards, *, margin=0.25, most: int = 3):\n    'Best of a group.'\n    return rewards\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "mine.py:best"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine.py:best (your function): Best of a group.",
        "mine.py:best.margin (a setting of best; default: 0.25)",
        "mine.py:best.most (a setting of best; default: 3)",
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("beta", "algorithm.kl.coef (a setting of kl"),
        ("epsilon", "algorithm.surrogate.clip_low (a setting of clip"),
        ("num_generations", "rollout.group_size ("),
        ("use_vllm", "write rollout.sampler.url, the addresses of servers"),
        ("num_train_epochs", "write train.steps"),
        ("kl", "algorithm.kl ("),
        ("clip_high", "algorithm.surrogate.clip_high (a setting of clip"),
        ("algorithm", "all ratios are 1 and clip settings have no effect"),
        ("Rollout.Group_Size", "rollout.group_size (default: 8"),
    ],
)
def test_names_of_trl_and_short_names_are_explained(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert says in capsys.readouterr().out


METRICS = re.findall(r"^\| `([\w/.]+)` \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
FUNCTIONS = sorted({f.__name__ for functions in AXES.values() for f in functions})


@pytest.mark.parametrize(
    "name", [*METRICS, *FUNCTIONS, *PRESETS, *BUILT_IN, *(rule.name for rule in RULES), *sorted(trl.NAMES)]
)
def test_every_metric_function_preset_reward_finding_and_name_of_trl_answers(name: str) -> None:
    found = find_entries(name)
    assert all(str(row["effect"]).strip() for row in found), found
    assert list(entry_lines(found))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kl/start", "kl/start (a metric; healthy: grows slowly"),
        ("reward/math_answer/mean", "reward/NAME/mean (a metric"),
        ("gradient_share/pass_rate_0.25_0.50", "from groups with a pass rate between A and B"),
        ("clip/", "clip/zero_gradient (a metric"),
        ("group_centered", "group_centered (a function of algorithm.advantage; used by dr_grpo"),
        ("group_centered", "source: arXiv 2503.20783): A_i = r_i - mean(r)"),
        ("k3", "k3 (a function of algorithm.kl.estimator"),
        ("dapo", "surrogate: clip\n    -min(rho A, r A)"),
        ("DAPO", "algorithm:\n  name: dapo"),
        ("cispo", "cispo (a function of algorithm.surrogate"),
        ("entropy_collapse", "Why: Entropy also falls when a task is learned"),
        ("rollout.group_size", "source: 64 in DeepSeekMath"),
    ],
)
def test_what_is_no_setting_is_explained_with_its_source(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert says in capsys.readouterr().out


def test_numbers_have_usual_values() -> None:
    """Every setting that is a number and changes what is learned says what others use."""
    numbers = {k for k in key_paths() if k.split(".")[0] in ("rollout", "train")}
    assert {row.key for row in schema_rows() if row.key in numbers and not row.setting.usual} <= WITHOUT


WITHOUT = {
    "rollout.stop", "rollout.curriculum", "rollout.adapt_group_size", "rollout.mask_truncated",
    "rollout.max_running", "train.optimizer", "train.schedule", "train.recompute_layers", "train.keep",
    "train.tokens_per_micro_batch", "train.final", "train.batch_size", "train.save_every", "train.betas",
}  # fmt: skip
"""Switches, and what does not change the result."""
