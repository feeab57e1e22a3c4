"""The pages on the objective say what the code does: presets, functions, settings, metrics."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fakes import component, group
from tests.objective.test_loss import made_inputs, t

import covey
from covey.objective import corrections
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axes import AXES
from covey.objective.bound import Bound, bind
from covey.objective.diagnostics import (
    gradient_shares,
    group_metrics,
    step_spread,
    token_metrics,
    token_stats,
    value_metrics,
)
from covey.objective.loss import policy_loss
from covey.objective.signs import gradient_signs, group_signs
from covey.rollouts.metrics import tool_metrics
from covey.tasks.difficulty import Difficulty
from covey_verify.types import StepRewards

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "algorithms").glob("*.md"))
README = (DOCS / "algorithms/README.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
ROOMS = [p.stem for p in (Path(covey.__file__).parent / "objective").glob("*.py")] + ["length"]


def sections() -> dict[str, str]:
    """Preset -> the page that has its section."""
    found = {}
    for page in PAGES:
        for name in re.findall(r"^## `(\w+)`$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found[name] = page.name
    return found


def short(choice: Bound | None) -> str:
    if choice is None:
        return ""
    values = [f"{v:g}" if isinstance(v, float) else str(v) for v in choice.settings.values() if v is not None]
    return " ".join([choice.name, "/".join(values)]).strip()


def row(name: str, algorithm: Algorithm) -> str:
    """A preset as a line of the table in the README."""
    kl = algorithm.kl
    pull = f"{kl.estimator.name} {kl.coef:g} {kl.place}" if kl else ""
    pull += " completion" if kl and kl.level == "completion" else ""
    rest = [algorithm.select_tokens, *algorithm.token_weights, *algorithm.correction, algorithm.filter]
    more = [short(c) for c in rest if c] + (["old sampler"] if algorithm.old == "sampler" else [])
    more += [f"critic {algorithm.critic.trunk}"] if algorithm.critic else []
    axes = (algorithm.advantage, algorithm.whiten, algorithm.ratio, algorithm.surrogate)
    cells = [*map(short, axes), pull, short(algorithm.reduce), ", ".join(more)]
    return f"| [`{name}`]({sections()[name]}#{name}) | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_section_and_its_row(name: str) -> None:
    assert name in sections()
    assert row(name, PRESETS[name]) in README.splitlines()


def test_no_section_is_about_something_that_does_not_exist() -> None:
    assert set(sections()) == set(PRESETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`({'|'.join(ROOMS)})\.(\w+)`", page.read_text(encoding="utf-8"))
    for room, function in named:
        place = "covey_verify.texts" if room == "length" else "covey.objective"
        module = importlib.import_module(f"{place}.{room}")
        assert inspect.isfunction(getattr(module, function, None)), f"{room}.{function}"


@pytest.mark.parametrize("function", [f for functions in AXES.values() for f in functions])
def test_every_function_of_an_axis_is_explained_somewhere(function) -> None:
    room = function.__module__.rpartition(".")[2]
    assert any(f"`{room}.{function.__name__}`" in p.read_text(encoding="utf-8") for p in PAGES)


# --- metrics --------------------------------------------------------------------------------------


def logged() -> set[str]:
    """Every metric that a step can log: what the functions return, and what the report adds."""
    everything = replace(
        PRESETS["grpo"],
        correction=(bind(corrections.decoupled),),
        entropy=None,
        surrogate=PRESETS["dapo"].surrogate,
    )
    inputs = made_inputs(
        sampler_logprobs=t([-1, -2], [-3, 0]), ref_logprobs=t([-1, -2], [-3, 0]), entropy=torch.ones(2, 2)
    )
    seen = token_metrics([token_stats(everything, inputs, policy_loss(everything, inputs))], everything)
    (one,) = groups = [group([1, 0])]
    groups = [replace(one, components={**one.components, "other_answer": component(one.rewards)})]
    verdicts = {"reward/NAME/STATUS", "reward/NAME/PART", "user/NAME"}  # tests/rewards/test_canaries.py
    names = {*seen, *verdicts, *group_metrics(groups), *gradient_shares(groups, torch.ones(2).numpy())}
    steps = (StepRewards([1.0], [0]), StepRewards([0.0], [0]))
    judged = replace(one, components={"j": component(one.rewards, steps=steps)})
    names |= set(Difficulty(3).metrics()) | signs() | set(step_spread([judged]))
    names |= set(tool_metrics(groups))
    names |= set(value_metrics(t([1, 2], [3, 4]), t([1, 0], [0, 1]), torch.ones(2, 2).bool()))
    counting = ["training/metrics.py", "rollouts/loop.py", "rollouts/metrics.py"]
    for file in (*counting, "training/preference.py", "training/reward_model.py"):
        text = (Path(covey.__file__).parent / file).read_text(encoding="utf-8")
        families = "rollout|staleness|optimizer|kl|entropy|update|value|preference|reward_model"
        names |= set(re.findall(rf'"((?:{families})/\w+)"', text))
    names = {re.sub(r"\d\.\d\d_\d\.\d\d", "A_B", name) for name in names}
    names = {re.sub(r"quarter_\d", "quarter_N", name) for name in names}
    return {re.sub("(other_)?answer", "NAME", name) for name in names}


def signs() -> set[str]:
    """What is counted for the findings."""
    steps = (StepRewards([1.0], [0]), StepRewards([0.0], [0]))
    groups = [replace(group([1, 0]), components={"judge": component([1, 0], steps=steps)})]
    advantages = [np.ones(2), -np.ones(2)]
    return {*group_signs(groups), *gradient_signs(groups, advantages), "kl/start", "reward/paid_elsewhere",
            "text/reference", "text/reference_elsewhere"}  # fmt: skip


def test_every_metric_is_explained_and_no_other() -> None:
    explained = set(re.findall(r"^\| `([\w/.]+)`", METRICS, flags=re.MULTILINE))
    assert logged() - explained == set()
    assert explained - logged() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_metric_that_a_page_watches_is_logged(page: Path) -> None:
    families = {name.partition("/")[0] for name in logged() if "/" in name}
    named = re.findall(rf"`((?:{'|'.join(families)})/[\w.]+)`", page.read_text(encoding="utf-8"))
    for name in named:
        assert re.sub(r"\d\.\d\d_\d\.\d\d", "A_B", name) in logged(), name


def test_the_numbers_that_the_pages_derive() -> None:
    # VESPO's weight outside [.05, 5], and the weight of easy and hard prompts under the std.
    for ratio in (0.05, 5.0):
        assert ratio**2 * math.exp(3 * (1 - ratio)) < 0.05
        assert ratio**3 * math.exp(2 * (1 - ratio)) < 0.05
    assert 1 / math.sqrt(0.05 * 0.95) == pytest.approx(4.6, abs=0.05)
