"""The contents of the lab besides its tools: guided pages, models under PPO and GRPO, ways to train."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from covey.config.algorithm import rows_of
from covey.insight.pages.lab import first_words
from covey.insight.recommendation import kept_multiple, measured_memory, routes
from covey.objective.advantages import group_zscore
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import AxisFunction
from covey.objective.surrogates import clip

Drawing = dict[str, Any]
MEMORY_OF = {"ppo": "ppo_reward_model", "grpo": "grpo", "dapo": "dr_grpo"}
"""Preset -> its row of the memory measurements; DAPO keeps the same models as Dr. GRPO."""
AXES_DRAWN = ("advantage", "ratio", "surrogate", "kl", "reduce")
WAYS = {"SFT": "Imitation", "DPO": "Preferences", "GRPO (dapo)": "Verifiable rewards"}
"""Method of `covey recommend` -> its title among the three ways to train."""


@cache
def lab_texts() -> Drawing:
    """Return the guided pages and the beginnings of the tools, from `lab.yaml`."""
    return yaml.safe_load((files("covey") / "insight" / "pages" / "lab.yaml").read_text(encoding="utf-8"))


def lab_contents() -> Drawing:
    """Return everything that the lab shows besides its tools' answers."""
    drawings = [
        {"name": name, "paper": PRESETS[name].paper, **model_roles(PRESETS[name], measured_memory()[route])}
        for name, route in MEMORY_OF.items()
    ]
    by_name = {route.name: route for route in routes()}
    return {
        "algorithms": drawings,
        "dpo": kept_multiple("dpo"),
        "ways": [by_name[name]._asdict() | {"title": title} for name, title in WAYS.items()],
        "settings": control_settings(),
        "presets": first_presets(),
        **lab_texts(),
    }


def control_settings() -> dict[str, Drawing]:
    """Return name -> default and sentence of each setting of the objective that the lab has a control for."""
    rows = [row for function in (group_zscore, clip) for row in rows_of(function, "")]
    return {
        row.key.removeprefix("."): {
            "default": row.default,
            "says": row.setting.effect,
            "usual": row.setting.usual,
        }
        for row in rows
    }


def first_presets() -> dict[str, str]:
    """Return estimator -> the first preset that uses it."""
    names: dict[str, str] = {}
    for name, preset in PRESETS.items():
        names.setdefault(preset.advantage.name, name)
    return names


def model_roles(algorithm: Algorithm, memory: Mapping[str, float]) -> Drawing:
    """Return an algorithm's composition, and the models that it keeps with their measured memory.

    Memory is in multiples of the policy's weights.
    """
    trained = sum(memory[part] for part in ("weights", "gradient", "optimizer"))
    critic = "values" in algorithm.needs
    reference = algorithm.needs_reference
    models = [
        ("policy", True, trained, "the model that is trained, its gradient, its optimizer"),
        ("critic", critic, memory["critic"], "predicts the reward from every prefix; trained too"),
        ("reference", reference, memory["reference"], "the frozen start, for the KL penalty"),
        ("reward", True, memory["reward_models"], "a program, or a frozen model that judges whole answers"),
    ]
    axes = {axis: getattr(algorithm, axis) for axis in AXES_DRAWN}
    return {
        "roles": [
            {"role": role, "kept": is_kept, "times": size, "says": text}
            for role, is_kept, size, text in models
        ],
        "total": sum(size for _, is_kept, size, _ in models if is_kept),
        "axes": {axis: _describe_function(value) for axis, value in axes.items()},
        "by_token": critic,
    }


def _describe_function(value: object) -> Drawing:
    if isinstance(value, AxisFunction):
        return {"name": value.name, "says": first_words(value.function), "settings": dict(value.all_settings)}
    kl = getattr(value, "estimator", None)
    if kl is None:
        return {"name": "none", "says": "No penalty, and no reference in memory.", "settings": {}}
    settings = {"place": getattr(value, "place", ""), "coef": getattr(value, "coef", 0.0)}
    return {"name": kl.name, "says": first_words(kl.function), "settings": settings}
