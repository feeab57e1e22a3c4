"""What the clip does to exploration, on decisions that share no weights; several answers are correct."""

from __future__ import annotations

import torch

from covey.objective.advantages import group_zscore
from covey.objective.surrogates import clip

DECISIONS, CHOICES, GROUP = 256, 10, 8
RATE, PASSES = 4.0, 8
LIKELY = 3.0
"""The logit of the first choice; all others have 0. It is correct, as are all others but one."""


def entropies(clip_high: float, steps: int = 40) -> list[float]:
    """Mean entropy in nats before each step of GRPO on softmaxes of free logits, several passes a group."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.zeros(DECISIONS, CHOICES)
    logits[:, 0] = LIKELY
    correct = torch.ones(CHOICES).index_fill_(0, torch.tensor([CHOICES - 1]), 0.0)
    groups = [group_zscore((torch.arange(GROUP) < n).float()) for n in range(GROUP + 1)]
    of_count = torch.stack([group[[0, -1]] for group in groups])  # of a correct choice, and of the other
    seen = []
    for _ in range(steps):
        probs = logits.softmax(-1)
        seen.append(float(-(probs * probs.log()).sum(-1).mean()))
        drawn = torch.multinomial(probs, GROUP, replacement=True, generator=draws)
        rewards = correct[drawn]
        advantages = of_count[rewards.sum(1).long()].gather(1, 1 - rewards.long())
        before = probs.log().gather(1, drawn)
        for _ in range(PASSES):
            moving = logits.clone().requires_grad_()
            ratio = (moving.log_softmax(-1).gather(1, drawn) - before).exp()
            loss = clip(ratio, advantages, clip_high=clip_high).mean(1).sum()
            logits = logits - RATE * torch.autograd.grad(loss, moving)[0]
    return seen


def test_entropy_falls_and_the_higher_the_upper_clip_the_slower() -> None:
    tight, dapo, wide = (entropies(high) for high in (0.2, 0.28, 1.0))
    for course in (tight, dapo, wide):
        assert course[0] > course[9] > course[19] > course[39]
    # A likely choice cannot reach 1.2 times its probability and is never held; rare ones are, at each bound.
    assert tight[39] < dapo[39] < wide[39]
    assert wide[39] > 1.1 * tight[39]
