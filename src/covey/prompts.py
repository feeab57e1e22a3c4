"""Problems as the model reads them: prompts to tokens, and what the model is never told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from covey.config.schema import Config
from covey.errors import ConfigError, DataError
from covey.models.chat import ignored
from covey.models.policy import Policy
from covey.tasks.source import Source
from covey.types import Problem


@dataclass(frozen=True)
class Prompted:
    """A problem and its prompt as the model reads it."""

    problem: Problem
    tokens: np.ndarray
    """(P,) int64."""


def texts_of(source: Source, config: Config) -> Iterable[str]:
    """What the tokenizer of `tiny` learns from: prompts and worked answers."""
    for problem in source.train:
        prompt = problem.prompt
        yield prompt if isinstance(prompt, str) else " ".join(str(m["content"]) for m in prompt)
        yield str(problem.columns.get(config.data.completion, ""))


def unseen_by_model(policy: Policy, problems: Sequence[Problem], config: Config) -> list[str]:
    """What the data gives the chat template and the model is never told; a sentence each."""
    notes = []
    texts = [p for p in problems if isinstance(p.prompt, str)]
    if texts and config.data.chat_template_kwargs:
        notes.append("data.chat_template_kwargs: text prompts go without a template; set data.chat: true")
    if tools := [p for p in texts if p.columns.get("tools")]:
        notes.append(
            f"{tools[0].id}: column tools does not reach the model: its prompt is plain text without a chat "
            "template; set data.chat: true"
        )
    checked: set[str] = set()
    for problem in problems:
        # Once per name: a template treats them all alike, and rendering everything twice takes its time.
        if isinstance(problem.prompt, str) or set(problem.template) <= checked:
            continue
        unseen = ignored(policy.tokenizer, problem.prompt, problem.template)
        notes += [
            f"{problem.id}: the model's chat template ignores {name}, so the model is not told of it"
            for name in unseen
            if name not in checked
        ]
        checked |= set(problem.template)
    return notes


def _tokens(policy: Policy, problem: Problem) -> list[int]:
    try:
        return policy.encode(problem.prompt, problem.template)
    except DataError as error:
        raise DataError(f"{problem.id}: {error}") from None


def encode(policy: Policy, problems: Sequence[Problem], config: Config) -> list[Prompted]:
    """Prompts as tokens. Those that leave no room for max_tokens are an error or left out."""
    room = policy.context - config.rollout.max_tokens
    encoded = [Prompted(p, np.array(_tokens(policy, p), dtype=np.int64)) for p in problems]
    _same_model(policy, encoded)
    if empty := [p for p in encoded if not len(p.tokens)]:
        raise DataError(f"{empty[0].problem.id}: the prompt has no tokens")
    long = [p for p in encoded if len(p.tokens) > room]
    if long and config.data.long_prompts == "error":
        worst = max(long, key=lambda p: len(p.tokens))
        raise DataError(
            f"{len(long)} of {len(encoded)} prompts leave no room for rollout.max_tokens "
            f"{config.rollout.max_tokens} in the model's context of {policy.context} tokens; the longest, "
            f"{worst.problem.id}, has {len(worst.tokens)}. Lower rollout.max_tokens or set "
            "data.long_prompts: drop"
        )
    kept = [p for p in encoded if len(p.tokens) <= room]
    if problems and not kept:
        raise DataError("no prompt is left: all are longer than the model's context allows")
    return kept


def _same_model(policy: Policy, encoded: Sequence[Prompted]) -> None:
    """Raise ConfigError if the tokenizer gives tokens that the model does not know."""
    known = policy.model.get_input_embeddings().num_embeddings
    largest = max((int(p.tokens.max(initial=0)) for p in encoded), default=0)
    if largest >= known:
        raise ConfigError(
            f"model: the tokenizer gives tokens up to {largest}, and the model knows {known}: they are of "
            "different models"
        )
