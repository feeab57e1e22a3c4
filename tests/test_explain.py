"""`covey explain`: what a setting, a metric, a function of the algorithm, a finding or a name of TRL's means."""

from __future__ import annotations

import json

import pytest

from covey.cli import main
from covey.cli.settings import settings
from covey.config.algorithm import algorithm_keys, algorithm_settings
from covey.config.effects import AXES_IN_WORDS, EFFECTS, USUAL, effect
from covey.config.sources import key_paths


def test_settings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rollout.group_size"]) == 0
    says = "rollout.group_size (default 8, >= 1 <= 65536, usual 4 to 64; 8 or 16 in most papers, "
    says += "TRL num_generations)"
    assert capsys.readouterr().out.startswith(f"{says}: Completions per prompt")
    assert main(["explain", "--json"]) == 0
    assert [s["setting"] for s in json.loads(capsys.readouterr().out)] == key_paths()
    assert main(["explain", "train.lrr"]) == 2
    assert "did you mean train.lr" in capsys.readouterr().err


@pytest.mark.parametrize("key", algorithm_keys())
def test_every_key_of_the_algorithm_is_explained(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 0
    assert capsys.readouterr().out.startswith(f"{key} (")


def test_there_is_an_effect_for_every_setting_of_the_algorithm_and_for_no_other() -> None:
    settings = {(function, p.name) for _, function, p in algorithm_settings()}
    assert all(effect(function, name) for function, name in settings)
    assert {e for e in EFFECTS if "." in e} <= {f"{function}.{name}" for function, name in settings}
    assert set(USUAL) <= {*key_paths(), *algorithm_keys()}
    assert set(AXES_IN_WORDS) == {k.split(".")[1] for k in algorithm_keys() if k.count(".") == 1} - {
        "estimator"
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("beta", "algorithm.kl.coef (of kl"),
        ("epsilon", "algorithm.surrogate.clip_low (of clip"),
        ("num_generations", "rollout.group_size ("),
        ("use_vllm", "completions are sampled by covey itself"),
        ("num_train_epochs", "write train.steps"),
        ("kl", "algorithm.kl ("),
        ("clip_high", "algorithm.surrogate.clip_high (of clip"),
        ("algorithm", "every ratio is 1: no setting of ratio or surrogate"),
    ],
)
def test_names_of_trl_and_short_names_are_explained(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert says in capsys.readouterr().out
