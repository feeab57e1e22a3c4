"""Conversion of TRL's reward functions and reward models to entries of `rewards`, with a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.rewards.contract import Reward
from covey.trl.configs import TrainerArguments
from covey.trl.meanings import UnsupportedArgument
from covey.trl.models import load_text_classifier

NEUTRAL_COLUMNS = frozenset({"prompt", "prompts", "completion", "completions"})
"""Columns that say nothing about the correct answer."""


def reward_entries(
    functions: object, tokenizers: object, args: TrainerArguments
) -> list[dict[Any, dict[str, object]]]:
    """Return covey's entries of `rewards` for functions and reward models, each with its weight."""
    all_functions = list(functions) if isinstance(functions, list | tuple) else [functions]
    if not all_functions or functions is None:
        raise UnsupportedArgument("No reward source provided: give at least one function in reward_funcs")
    weights = list(args.reward_weights or [1.0] * len(all_functions))
    if len(weights) != len(all_functions):
        raise UnsupportedArgument(
            f"Number of reward weights ({len(weights)}) must match number of reward functions "
            f"({len(all_functions)})"
        )
    if tokenizers is None:
        tokenizers = [None] * len(all_functions)
    all_tokenizers = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if len(all_tokenizers) != len(all_functions):
        raise UnsupportedArgument(
            f"The number of reward processing classes ({len(all_tokenizers)}) must match the number of "
            f"reward functions ({len(all_functions)})."
        )
    entries: list[dict[Any, dict[str, object]]] = []
    for function, tokenizer, weight in zip(all_functions, all_tokenizers, weights, strict=True):
        reward_function, name = _reward_function(function, tokenizer)
        names = {str(entry_settings["name"]) for entry in entries for entry_settings in entry.values()}
        unique = name if name not in names else f"{name}_{len(entries)}"
        entries.append({reward_function: {"weight": float(weight), "name": unique}})
    return entries


def _reward_function(function: object, tokenizer: object) -> tuple[Callable[..., object], str]:
    """Return a reward function and its name; a reward model becomes a function."""
    if isinstance(function, str | Path | nn.Module):
        model, loaded_tokenizer = load_text_classifier(function, tokenizer)
        source = str(getattr(model.config, "_name_or_path", "") or "reward_model")
        return ModelReward(model.eval(), loaded_tokenizer), source.rpartition("/")[2]
    if not callable(function):
        raise UnsupportedArgument(
            "reward_funcs: a reward must be a function, or the folder or hub id of a reward model"
        )
    name = getattr(function, "__name__", type(function).__name__)
    return function, "reward" if name == "<lambda>" else name


class ModelReward:
    """A reward model as a reward function. The name of this class is in a run's record."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: object) -> list[float]:
        """Return the model's number for each prompt with its completion; chats go through the template."""
        pairs = list(zip(prompts, completions, strict=True))
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in pairs]
        else:
            texts = [self.tokenizer.apply_chat_template([*p, *c], tokenize=False) for p, c in pairs]
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        encoded = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self.model.device)
        outputs = self.model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"])
        return outputs.logits[:, 0].tolist()


def mark_verdict(entries: Sequence[dict[Any, dict[str, object]]], columns: set[str]) -> list[str]:
    """Mark a reward as the verdict, unless one is declared; return a note on the choice.

    TRL has no verdict: it only adds rewards up. The verdict is the only function whose signature names a
    column of the data, since a verifier has to know the problem, or else the first function. Only accuracy,
    which TRL does not measure, depends on it.
    """
    candidates = [(entry, Reward("", next(iter(entry)))) for entry in entries]
    if len(entries) < 2 or any(reward.options.verdict for _, reward in candidates):
        return []
    eligible = [(entry, reward) for entry, reward in candidates if reward.may_be_verdict] or candidates
    verifiers = []
    for entry, reward in eligible:
        names = sorted(columns.intersection(reward.parameters) - NEUTRAL_COLUMNS)
        if names:
            verifiers.append((entry, names))
    if len(verifiers) == 1:
        entry, names = verifiers[0]
        why = f"the only reward that asks for a column ({names[0]})"
    else:
        entry, why = eligible[0][0], "the first one"
    (settings,) = entry.values()
    settings["verdict"] = True
    choice = f"{settings['name']} says what is correct, {why}; @covey.reward(verdict=True) chooses another"
    return [f"{choice}. Training follows the sum of all"]
