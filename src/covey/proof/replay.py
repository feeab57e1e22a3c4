"""The repetition of a recorded run with the shadow trainer, whose results must agree with the record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from covey.proof import shadow
from covey.proof.agreement import Agreement, StepFigures, agreement, read_saved_weights, with_twin
from covey.proof.decoder import NamedWeights, coarse_product, copy_weights, exact_product
from covey.proof.descent import ShadowConfig, ShadowTrainer
from covey.proof.formulas import AxisSettings, ShadowRow
from covey.runs.folder import read_numbers
from covey.runs.reader import read_environment, recorded_settings
from covey.runs.rollouts import read_rollouts
from covey.types import SamplingMask
from covey_verify.errors import ConfigError


def replay(
    folder: Path, model: NamedWeights, architecture: AxisSettings, steps: int, twin: bool = False
) -> Iterator[Agreement]:
    """Repeat the first steps of a recorded stage from the weights it began with.

    ``model`` holds these weights by their Hugging Face names, in float64; the trained weights
    require a gradient. With ``twin`` a second shadow begins with slightly different weights and repeats the
    same steps. Raises ConfigError if the run used a function that the shadow does not know.
    """
    setting = read_setting(folder, architecture)
    start = copy_weights(model)
    trainers = [
        _first_trainer(folder, setting, weights) for weights in with_twin(model, setting.rounded, twin)
    ]
    # pasts[i]: the old weights of trainers[i], for completions that earlier versions sampled.
    pasts: list[OldWeights] = [{} for _ in trainers]
    for number, record in enumerate(read_numbers(folder, "metrics.jsonl")[:steps]):
        rows, _ = read_step(folder, number)
        pairs = list(zip(trainers, pasts, strict=True))
        figures, *twins = [_repeat_step(folder, trainer, past, setting, number) for trainer, past in pairs]
        tokens = [_tokens_of_versions(versions, pasts[0]) for _, _, versions in rows]
        recorded = StepFigures(
            [row.sampled for row, *_ in rows],
            [advantage for _, advantage, _ in rows],
            record.get("optimizer/grad_norm", 0.0),
            record.get("kl/coef"),
            read_saved_weights(folder, number, setting.train["steps"], figures.weights),
        )
        apart = next((agreement(number, figures, twin, tokens, start) for twin in twins), None)
        yield replace(agreement(number, figures, recorded, tokens, start), apart=apart)


def _first_trainer(folder: Path, setting: ShadowConfig, model: NamedWeights) -> ShadowTrainer:
    start = copy_weights(model)
    # The reference of a LoRA run is the model without its adapters.
    reference = {name: w for name, w in start.items() if "lora_" not in name}
    kl = setting.algorithm["kl"]
    bonus = setting.algorithm["entropy"]
    trainer = ShadowTrainer(model, reference, _critic(setting, start, folder))
    trainer.kl_coef = kl["coef"] if kl else 0.0
    trainer.entropy_coef = bonus["coef"] if bonus else 0.0
    return trainer


OldWeights = dict[int, NamedWeights]
"""Version -> its weights, which may have sampled completions of the current step."""


def _tokens_of_versions(versions: np.ndarray | None, past: OldWeights) -> slice | torch.Tensor:
    """Return the indices of tokens whose version the shadow still has; without versions, of all tokens."""
    return slice(None) if versions is None else torch.from_numpy(np.isin(versions, list(past)))


def _remember(past: OldWeights, trainer: ShadowTrainer, staleness: int) -> None:
    """Keep the weights at the start of a step and of as many earlier steps as completions may lag."""
    past[trainer.updates] = {
        # The optimizer updates weights in place; a copy is needed only if a later step reads them.
        name: w.detach().clone() if w.requires_grad and staleness else w.detach()
        for name, w in trainer.weights.items()
    }
    for version in sorted(past)[: -staleness - 1]:
        del past[version]


def _repeat_step(
    folder: Path, trainer: ShadowTrainer, past: OldWeights, setting: ShadowConfig, number: int
) -> StepFigures:
    """Repeat a step with a shadow trainer, which updates its weights."""
    recorded, sampled = read_step(folder, number)
    coefficient = trainer.kl_coef
    step = trainer.updates
    _remember(past, trainer, setting.staleness)
    try:
        outcome = shadow.step(trainer, setting, [row for row, *_ in recorded], number)
    except KeyError as error:
        raise ConfigError(f"{folder}: the replay supports only covey's own functions, not {error}") from None
    # Log-probs under the present weights; tokens of older versions are replaced one version at a time.
    logprobs = list(outcome.logprobs)
    for n, (row, _, versions) in enumerate(recorded):
        if versions is None:
            continue
        for version in set(versions.tolist()) & set(past) - {step}:
            with torch.no_grad():
                under = shadow.pick_log_probs(shadow.distribution(past[version], setting, row), row)
            logprobs[n] = torch.where(torch.from_numpy(versions == version), under, logprobs[n])
    shadow.update_coefficients(trainer, setting, outcome, sampled)
    norm = sum(outcome.norms) / max(len(outcome.norms), 1)
    return StepFigures(logprobs, [row.advantage for row in outcome.rows], norm, coefficient, trainer.weights)


def _critic(setting: ShadowConfig, start: NamedWeights, folder: Path) -> ShadowTrainer | None:
    """Return the first critic: a head of zeros on a copy of the policy's weights, or the head alone."""
    axis = setting.algorithm["critic"]
    if not axis:
        return None
    own_trunk = axis["trunk"] == "own"
    if own_trunk and (axis["model"] or any("lora_" in name for name in start)):
        raise ConfigError(f"{folder}: the replay does not support a critic that starts from another model")
    body = {name: w.clone() for name, w in start.items() if own_trunk and name != "lm_head.weight"}
    width = len(start["model.norm.weight"])
    head = {"value.weight": torch.zeros(width).double(), "value.bias": torch.zeros(()).double()}
    return ShadowTrainer({name: w.requires_grad_() for name, w in {**body, **head}.items()}, {})


def read_setting(folder: Path, architecture: AxisSettings) -> ShadowConfig:
    """Return the settings that affect the weights. Raises ConfigError for any the shadow cannot repeat."""
    config = recorded_settings(folder) or {}
    if config["guards"]["kl_action"] == "raise_coef" or config["train"]["optimizer"] != "adamw":
        raise ConfigError(
            f"{folder}: the replay supports neither guards.kl_action raise_coef nor 8-bit moments"
        )
    rollout = config["rollout"]
    record = read_environment(folder) or {}
    return ShadowConfig(
        architecture,
        config["algorithm"],
        config["train"],
        rollout["temperature"],
        rollout["max_tokens"],
        rollout["mask_truncated"],
        rollout["group_size"],
        config["seed"],
        rounded=config["dtype"] == "bfloat16",
        product=coarse_product if record.get("rounds_products") else exact_product,
        vocabulary=record.get("known_tokens"),
        staleness=rollout["staleness"],
    )


def read_step(
    folder: Path, number: int
) -> tuple[list[tuple[ShadowRow, torch.Tensor, np.ndarray | None]], int]:
    """Read a step: (row, advantages, versions) of each trained completion, and the number of groups."""
    log = read_rollouts(folder, number + 1)
    rows = []
    for n, line in enumerate(log.rows):
        if line["trained"]:
            arrays = log.of_completion(n)
            mask = log.completion(n).sampling_mask
            # Indices of the sampled tokens. Results of tools between them are read, but not trained.
            sampled = np.flatnonzero(arrays.get("sampled", np.ones(len(arrays["tokens"]))))
            row = ShadowRow(
                prompt=log.prompts[line["group"]].tolist(),
                tokens=arrays["tokens"].tolist(),
                positions=sampled.tolist(),
                sampled=torch.from_numpy(arrays["logprobs"][sampled]).double(),
                reward=_number_or_nan(line["reward"]),
                components={k: _number_or_nan(v) for k, v in line["components"].items()},
                weights=line["weights"],
                truncated=line["finish"] == "length",
                steps=line["steps"],
                allowed=_ids_of(mask),
                greedy=line["greedy_reward"],
                running=line.get("running_mean", 0.0),
                segments=[(int(end), float(value)) for end, value in line.get("segments", ())],
                correct=line.get("correct", False),
                group=line["group"],
            )
            advantages = torch.from_numpy(arrays["advantages"][sampled]).double()
            versions = arrays["versions"][sampled] if "versions" in arrays else None
            rows.append((row, advantages, versions))
    return rows, len(log.prompts)


def _ids_of(mask: SamplingMask | None) -> list[list[int]] | None:
    """Return the ids that could be drawn at each token; None if all could be."""
    return None if mask is None else [ids.tolist() for ids in np.split(mask.ids, mask.ends[:-1])]


def _number_or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)
