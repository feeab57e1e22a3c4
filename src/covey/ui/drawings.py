"""What the lab shows besides its tools: guided pages, the models under PPO and GRPO, three ways to train."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from covey.config.load import load_config
from covey.learner.memory import Asked, Shape, forecast
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.bound import Bound
from covey.ui.lab import first_words

Drawing = dict[str, Any]
BILLION = Shape(
    parameters=1_000_000_000,
    trained=1_000_000_000,
    vocabulary=151_936,
    layers=28,
    width=1536,
    queries=12,
    keys=2,
    head=128,
    inner=8960,
    number=2,
    exact=False,
)
"""A model of a billion parameters in bfloat16, for the memory of its model_roles."""
KEPT_BY_TRAINED = ("weights", "gradient", "optimizer")
"""What a model that is trained keeps in memory."""
AXES_DRAWN = ("advantage", "ratio", "surrogate", "kl", "reduce")


@cache
def lab_texts() -> Drawing:
    """Guided pages and the three ways to train, from `lab.yaml`."""
    return yaml.safe_load((files("covey") / "ui" / "lab.yaml").read_text(encoding="utf-8"))


def lab_contents() -> Drawing:
    """Everything that the lab shows besides its tools' answers."""
    names = ("ppo", "grpo", "dapo")
    drawn = [{"name": name, "paper": PRESETS[name].paper, **model_roles(PRESETS[name])} for name in names]
    both = sum(role["bytes"] for role in drawn[1]["roles"] if role["role"] in ("policy", "reference"))
    return {"algorithms": drawn, "dpo": both, **lab_texts()}


def model_roles(algorithm: Algorithm) -> Drawing:
    """The models that an algorithm keeps, what each takes, and its composition axis by axis."""
    config = load_config(values={"model": "tiny", "data": {"task": "last_digit"}}).config
    taken = forecast(BILLION, config, Asked(256, 4096), 4096, algorithm.needs_reference, 0)
    trained = sum(taken[part] for part in KEPT_BY_TRAINED)
    critic = "values" in algorithm.needs
    models = [
        ("policy", True, trained, "the model that is trained"),
        ("critic", critic, trained if critic else 0, "predicts the reward from every prefix; trained too"),
        ("reference", algorithm.needs_reference, taken["reference"], "the frozen start, for the KL penalty"),
        ("reward", True, 0, "a program, or a frozen model that judges whole answers"),
    ]
    shown = {axis: getattr(algorithm, axis) for axis in AXES_DRAWN}
    return {
        "roles": [{"role": r, "kept": kept, "bytes": size, "says": text} for r, kept, size, text in models],
        "total": sum(size for _, kept, size, _ in models if kept),
        "axes": {axis: _named(value) for axis, value in shown.items()},
        "by_token": critic,
    }


def _named(value: object) -> Drawing:
    if isinstance(value, Bound):
        return {"name": value.name, "says": first_words(value.function), "settings": dict(value.all_settings)}
    kl = getattr(value, "estimator", None)
    if kl is None:
        return {"name": "none", "says": "No penalty, and no reference in memory.", "settings": {}}
    where = {"place": getattr(value, "place", ""), "coef": getattr(value, "coef", 0.0)}
    return {"name": kl.name, "says": first_words(kl.function), "settings": where}
