"""`covey check RUN`: repeats the first steps of a recorded run, or of each stage, with the shadow trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from covey.config.load import ResolvedConfig
from covey.config.methods import METHODS, POLICY_METHODS
from covey.learner.process import restore_process_settings, set_process
from covey.models.forward import is_supported
from covey.models.load import load_policy
from covey.models.policy import Policy
from covey.proof.agreement import Agreement
from covey.proof.check import GRADIENT_ROUNDING, LOGPROB_ROUNDING, Claim
from covey.proof.replay import replay
from covey.proof.replay_given import given_examples_of, replay_given
from covey.runs.archive import archive_of
from covey.runs.folder import read_numbers
from covey.runs.reader import (
    last_stage,
    load_recorded,
    read_environment,
    stage_method,
    stage_number,
    stages_in,
)
from covey.runs.rollbacks import changed_after
from covey.sampling.prompts import texts_of
from covey.system.console import RunConsole
from covey.tasks.pipeline_check import STAGE
from covey.tasks.source import load_source
from covey_verify.errors import ConfigError


def check_run(folder: Path, steps: int, console: RunConsole, trust: bool = False) -> list[Claim]:
    """Repeat the first steps of a recorded run in float64, and compare them with the record.

    In a pipeline, the first steps of each stage that trained a policy are repeated, from the model of the
    previous stage. Raises ConfigError for a run that the shadow trainer cannot repeat.
    """
    if (folder / "config.yaml").exists() or not stages_in(folder):
        return _check_stage(last_stage(folder), steps, console, trust)
    claims: list[Claim] = []
    for stage in stages_in(folder):
        obstacle = unrepeatable(stage_method(stage)) or ("" if has_steps(stage) else NO_STEPS)
        if obstacle:
            console.say(f"skipping {stage.name}: {obstacle}")
        else:
            of_stage = _check_stage(stage, steps, console, trust)
            claims += [replace(claim, sentence=f"{stage.name}: {claim.sentence}") for claim in of_stage]
    if not claims:
        raise ConfigError(f"{folder}: no stage has steps that can be repeated: {stage.name}: {obstacle}")
    return claims


def has_steps(stage: Path) -> bool:
    """Return whether a stage has recorded a step."""
    return bool(read_numbers(stage, "metrics.jsonl"))


def unrepeatable(method: str) -> str:
    """Return why steps of a method cannot be repeated; empty if they can."""
    if METHODS[method].makes:
        return f"{method} trains no model"
    if method == "reward_model":
        return "the second trainer knows no reward models"
    return ""


def _check_stage(stage: Path, steps: int, console: RunConsole, trust: bool) -> list[Claim]:
    resolved = from_stage_before(load_recorded(stage, trust=trust), stage.resolve())
    obstacle = unrepeatable(resolved.config.method)
    if obstacle:
        raise ConfigError(f"{stage}: no step can be repeated: {obstacle}")
    change = changed_after(stage)
    if change:
        raise ConfigError(
            f"{stage}: after {change} steps it continued with other settings (rollbacks.jsonl), and the "
            f"second trainer takes one config. Check {archive_of(stage, 1)}, the run before that"
        )
    console.show_work(f"repeating {steps} steps of {stage} in float64, one example at a time")
    with restore_process_settings():
        set_process(resolved.config)  # seeds the random first adapters of a LoRA run
        return _check_repeat(stage, resolved, steps, console)


def from_stage_before(resolved: ResolvedConfig, stage: Path) -> ResolvedConfig:
    """Return a stage's config with the model from which it must have begun: an earlier stage's.

    The stage's record names that model. If the record names none of them, it is the model of the last earlier
    stage that left a policy.
    """
    number = stage_number(stage) if STAGE.fullmatch(stage.name) else 0
    earlier = [s for s in stages_in(stage.parent) if stage_number(s) < number]
    policies = [s / "final" for s in earlier if stage_method(s) in POLICY_METHODS]
    if not policies or str(resolved.config.model) in map(str, policies):
        return resolved
    return replace(resolved, config=resolved.config.model_copy(update={"model": str(policies[-1])}))


COARSE_FACTOR = 200
"""Factor on all limits if activations are bfloat16, or if a part of the run was rounded."""
TWIN_FACTOR = 10
"""A run may differ from the shadow by so many times the twin's difference, since the twin is rounded once."""
CLAIMS = (
    ("the recorded log-probs follow from the weights of each step", "logprobs", "nats", LOGPROB_ROUNDING),
    ("the advantages follow from the recorded rewards", "advantages", "of the largest", GRADIENT_ROUNDING),
    (
        "the gradients follow from the objective's formulas",
        "gradient",
        "of their norm",
        10 * GRADIENT_ROUNDING,
    ),
    ("the KL coefficient follows its controller", "kl_coef", "of it", GRADIENT_ROUNDING),
    (
        "loss and metrics follow from the given examples",
        "metrics",
        "of the value, or of 1 where that is larger,",
        10 * GRADIENT_ROUNDING,
    ),
    ("the saved weights follow from these gradients by AdamW", "course", "of the way", 0.01),
)
"""(claim, difference that decides on it, its unit, the largest difference by float32 in a few steps)."""
NO_STEPS = "no step has been recorded yet"
REPLAYED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model families that the second trainer knows."""


def has_sliding_window(policy: Policy) -> bool:
    """Return whether some layer attends to a sliding window."""
    return policy.decoder is not None and policy.decoder.windows != {None}


def coarsely_computed(stage: Path) -> bool:
    """Return whether a run was rounded in ways that the shadow does not repeat, according to its record.

    Raises ConfigError without a record, because then the tolerance is unknown.
    """
    record = read_environment(stage) or {}
    if "rounded" not in record:
        raise ConfigError(
            f"{stage}: env.json is missing, which says whether numbers were rounded, and so how close the "
            "repeat must be. Restore the file"
        )
    return record["rounded"] and not record.get("rounds_products")


def _check_repeat(stage: Path, resolved: ResolvedConfig, steps: int, console: RunConsole) -> list[Claim]:
    # Only the weights are needed, so that a machine without the run's precision can load them too.
    resolved = replace(resolved, config=resolved.config.model_copy(update={"precision": "float32"}))
    policy = load_policy(resolved, texts_of(load_source(resolved), resolved.config))
    if (
        policy.model.config.model_type not in REPLAYED_FAMILIES
        or not is_supported(policy.model)
        or has_sliding_window(policy)
    ):
        raise ConfigError(
            f"{stage}: the replay supports models of the Llama family, not {policy.model.config.model_type}"
        )
    scale = COARSE_FACTOR if coarsely_computed(stage) else 1.0
    repeat = _repetition(stage, resolved, policy, steps)
    agreements = list(repeat(shadow_weights(policy), twin=False))
    if not agreements:
        raise ConfigError(f"{stage}: {NO_STEPS}")
    # A twin doubles the time, so it runs only if a fixed limit was exceeded.
    if not all(claim.holds for claim in _claims(agreements, scale)):
        console.show_work("repeating them together with a copy that differs by rounding")
        agreements = list(repeat(shadow_weights(policy), twin=True))
    return list(_claims(agreements, scale))


def _repetition(
    stage: Path, resolved: ResolvedConfig, policy: Policy, steps: int
) -> Callable[..., Iterator[Agreement]]:
    """Return the function that repeats the steps of a recorded stage from given weights."""
    shape = policy.model.config.to_dict()
    if not METHODS[resolved.config.method].learns_from:
        return partial(replay, stage, architecture=shape, steps=steps)
    return partial(
        replay_given, stage, architecture=shape, dataset=given_examples_of(resolved, policy), steps=steps
    )


def _claims(agreements: Sequence[Agreement], scale: float) -> Iterator[Claim]:
    """Yield each claim: every step is within its limit, or near the effect of rounding alone."""
    where = f"in steps 1 to {agreements[-1].step}"
    for claim, quantity, unit, limit in CLAIMS:
        steps = [a for a in agreements if getattr(a, quantity) is not None]
        if not steps:
            continue
        differences = [getattr(a, quantity) for a in steps]
        # Running maximum of what rounding alone causes.
        rounding = list(accumulate((getattr(a.apart, quantity, 0.0) for a in steps), max))
        limits = [max(scale * limit, TWIN_FACTOR * largest) for largest in rounding]
        holds = all(difference < most for difference, most in zip(differences, limits, strict=True))
        evidence = f"largest difference {max(differences):.1e} {unit} {where}"
        if rounding[-1] and max(differences) >= scale * limit:
            evidence += f"; rounding alone comes to {rounding[-1]:.1e}"
        yield Claim(claim, holds, evidence)


def shadow_weights(policy: Policy) -> dict[str, Tensor]:
    """Return a policy's weights in float64 by Hugging Face name; trained ones require gradients."""
    weights: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        plain = name.replace(".base_layer", "").replace(".default.weight", "")
        weights[plain] = parameter.detach().double().requires_grad_(parameter.requires_grad)
    if policy.adapter is not None:
        settings = policy.adapter.peft_config["default"]
        weights["lora_scale"] = torch.tensor(settings.lora_alpha / settings.r, dtype=torch.float64)
    return weights
