"""Groups that a small reward model in a folder has judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from covey.models.tiny import build_tokenizer
from covey.rewards.loading import load_rewards
from covey.rewards.reading import ReplyReader
from covey.rewards.scorer import Rewards
from covey.rollouts.learned import LEARNED
from covey.types import Completion, Group, Problem

WORKED = "1+2 = 3\n\n3+4 = 7\n\nso 7"


def judged(folder: Path, kind: str, texts: list[str], prompt: Any = "1+2+4=", **settings: Any) -> Group:
    """A group under a config in ``folder`` whose model stands beside it; ``prompt`` may be a problem."""
    rewards = load_rewards([{kind: {"model": "judge", **settings}}], folder, learned=LEARNED)
    return judged_by(rewards, texts, prompt)


def judged_by(rewards: Rewards, texts: list[str], prompt: Any = "1+2+4=") -> Group:
    """A group that these rewards have scored."""
    tokenizer = build_tokenizer([WORKED] * 3)
    rewards = replace(
        rewards, reader=ReplyReader(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    )
    completions = []
    for text in texts:
        tokens = np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
        completions.append(Completion(tokens, np.zeros(len(tokens), np.float32), text, "stop"))
    problem = prompt if isinstance(prompt, Problem) else Problem("p", prompt)
    return rewards.score_group(problem, np.array([1]), completions, strict=True)
