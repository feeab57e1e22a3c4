"""Reward functions and reward models in TRL's form, as covey's rewards, and the choice of the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.rewards.contract import Reward
from covey.trl.configs import Arguments
from covey.trl.meanings import Refused
from covey.trl.models import reward_model_of

PROMPTS = frozenset({"prompt", "prompts", "completion", "completions"})
"""Columns that say nothing about the correct answer."""


def reward_entries(
    functions: object, tokenizers: object, args: Arguments
) -> list[dict[Any, dict[str, object]]]:
    """Return covey's entries of `rewards` for functions and reward models, each with its weight."""
    every = list(functions) if isinstance(functions, list | tuple) else [functions]
    if not every or functions is None:
        raise Refused("No reward source provided: give at least one function in reward_funcs")
    weights = list(args.reward_weights or [1.0] * len(every))
    if len(weights) != len(every):
        raise Refused(
            f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(every)})"
        )
    words = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if tokenizers is None:
        words = [None] * len(every)
    if len(words) != len(every):
        raise Refused(
            f"The number of reward processing classes ({len(words)}) must match the number of reward "
            f"functions ({len(every)})."
        )
    entries: list[dict[Any, dict[str, object]]] = []
    for function, tokenizer, weight in zip(every, words, weights, strict=True):
        called, name = _callable(function, tokenizer)
        names = {str(entry_settings["name"]) for entry in entries for entry_settings in entry.values()}
        unique = name if name not in names else f"{name}_{len(entries)}"
        entries.append({called: {"weight": float(weight), "name": unique}})
    return entries


def _callable(function: object, tokenizer: object) -> tuple[Callable[..., object], str]:
    """Return a reward function and its name; a reward model becomes a function."""
    if isinstance(function, str | Path | nn.Module):
        model, words = reward_model_of(function, tokenizer)
        source = str(getattr(model.config, "_name_or_path", "") or "reward_model")
        return ModelReward(model.eval(), words), source.rpartition("/")[2]
    if not callable(function):
        raise Refused("reward_funcs: a reward must be a function, or the folder or hub id of a reward model")
    name = getattr(function, "__name__", type(function).__name__)
    return function, "reward" if name == "<lambda>" else name


class ModelReward:
    """A reward model as a reward function; a run's record has the name of this class."""

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
    """Mark the reward that says what is correct, if none is declared; return a note about the choice.

    TRL only adds rewards up. Among several the verifier is chosen that knows the problem: the only function
    whose signature names a column of the data; else the first one. Only accuracy, which TRL does not have,
    depends on it.
    """
    candidates = [(entry, Reward("", next(iter(entry)))) for entry in entries]
    if len(entries) < 2 or any(reward.options.verdict for _, reward in candidates):
        return []
    able = [(entry, reward) for entry, reward in candidates if reward.may_be_verdict] or candidates
    read = [(entry, sorted(columns.intersection(reward.parameters) - PROMPTS)) for entry, reward in able]
    verifiers = [(entry, names) for entry, names in read if names]
    if len(verifiers) == 1:
        entry, names = verifiers[0]
        why = f"the only reward that asks for a column ({names[0]})"
    else:
        entry, why = able[0][0], "the first one"
    (settings,) = entry.values()
    settings["verdict"] = True
    choice = f"{settings['name']} says what is correct, {why}; @covey.reward(verdict=True) chooses another"
    return [f"{choice}. Training follows the sum of all"]
