"""Which method for what there is: configs that load, memory as it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli import main
from covey.config.load import load_config
from covey.insight.recommendation import KEPT, Resources, kept_multiple, measured_memory, recommend, routes
from covey_verify.errors import ConfigError


@pytest.mark.parametrize(
    ("have", "name"),
    [
        ({"pairs": 5000, "budget": "tight"}, "DPO"),
        ({"pairs": 5000, "budget": "ample"}, "reward model, then PPO"),
        ({"verifier": True}, "GRPO (dapo)"),
        ({"verifier": True, "pairs": 5000, "budget": "ample"}, "GRPO (dapo)"),
        ({"verifier": True, "steps": True}, "process rewards"),
        ({"steps": True}, "process reward model, then GRPO"),
        ({"judged": 900}, "KTO"),
        ({"judged": 900, "budget": "ample"}, "reward model, then PPO"),
        ({"worked": 100}, "SFT"),
    ],
)
def test_the_data_at_hand_decide_the_recommended_method(have: dict, name: str) -> None:
    assert recommend(Resources(**have), 0, 0)[0]["recommended"] == name


def test_every_config_loads(tmp_path: Path) -> None:
    for route in routes():
        (tmp_path / "route.yaml").write_text(route.config)
        for stage in load_config(tmp_path / "route.yaml").stages():
            assert stage.config.data.train or stage.config.data.examples, route.name
        assert route.memory in measured_memory()


def test_memory_is_that_of_the_models_that_a_route_keeps() -> None:
    """In float32 a trained model keeps weights, gradient and two moments; a reference its weights alone."""
    for name in ("grpo", "dr_grpo", "ppo_network", "ppo_reward_model", "dpo", "rejection_sampling", "lora"):
        assert set(KEPT) <= set(measured_memory()[name])
    assert kept_multiple("dr_grpo") == pytest.approx(4, abs=0.05)
    assert kept_multiple("grpo") == pytest.approx(5, abs=0.05)
    assert kept_multiple("ppo_network") == pytest.approx(9, abs=0.1)
    assert kept_multiple("ppo_reward_model") == pytest.approx(10, abs=0.1)
    assert kept_multiple("dpo") == pytest.approx(4, abs=0.05)
    assert 1 < kept_multiple("lora") < 2.5


def test_what_does_not_fit_is_said_with_what_would() -> None:
    record, lines = recommend(Resources(pairs=600), 1.5, 24)
    (row,) = [r for r in record["routes"] if r["route"] == "DPO"]
    assert row["gigabytes"] == pytest.approx(4 * 4 * 1.5, rel=0.02)
    assert row["fits"] is False
    assert any("lora" in line for line in lines)
    assert recommend(Resources(pairs=600), 0.5, 24)[0]["routes"][4]["fits"] is True


def test_advice_beside_it() -> None:
    said = " ".join(recommend(Resources(verifier=True, pairs=50, worked=10), 0, 0)[0]["advice"])
    assert "method: sft" in said
    assert "method: dpo" in said
    assert "are few" in recommend(Resources(pairs=50), 0, 0)[0]["advice"][0]


@pytest.mark.parametrize(
    ("have", "size", "says"),
    [
        ({}, 0.0, "nothing to learn from"),
        ({"pairs": -1}, 0.0, "--pairs -1"),
        ({"pairs": 1}, -2.0, "--parameters"),
    ],
)
def test_nonsense_is_refused(have: dict, size: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recommend(Resources(**have), size, 0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--pairs", "5000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == "DPO"
    assert main(["recommend", "--verifier"]) == 0
    assert "algorithm: dapo" in capsys.readouterr().out
    assert main(["recommend"]) == 2
    assert "--verifier" in capsys.readouterr().err
