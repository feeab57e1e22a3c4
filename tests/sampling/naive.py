"""Completions by whole forward passes of the Hugging Face model, to compare a sampler with."""

from __future__ import annotations

import numpy as np
import torch

from covey.models.policy import Policy
from covey.rng import key, uniforms
from covey.sampling.base import Request, SamplingParams
from covey.sampling.draw import draw
from covey.sampling.local import LocalSampler
from covey.types import Completion


def requests(prompts: list[np.ndarray], size: int = 3, step: int = 0) -> list[Request]:
    return [Request(p, [key(7, step, i, g) for g in range(size)]) for i, p in enumerate(prompts)]


def sampled(policy: Policy, asked: list[Request], params: SamplingParams, slots: int = 64) -> dict:
    found = {(r, s): c for r, s, c in LocalSampler(policy, slots).sample(asked, params)}
    assert len(found) == sum(len(r.streams) for r in asked)
    return found


@torch.no_grad()
def naive(policy: Policy, prompt: np.ndarray, stream: int, params: SamplingParams) -> Completion:
    """One completion by whole forwards of the Hugging Face model: slow and plain."""
    tokens, logprobs = list(prompt), []
    for u in uniforms(stream, params.max_tokens):
        logits = policy.model(torch.tensor([tokens])).logits[:, -1]
        token, logprob, _ = draw(logits, torch.tensor([float(u)]), params)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        if tokens[-1] in policy.end_ids:
            break
    drawn = np.array(tokens[len(prompt) :])
    finish = "stop" if drawn[-1] in policy.end_ids else "length"
    return Completion(drawn, np.array(logprobs, np.float32), "", finish)


SETTINGS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.5),
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, top_k=3),
    # Not 0.6: one nucleus of the mixture of experts ends 5e-8 beyond it, so that rounding decides on a token.
    SamplingParams(max_tokens=12, top_p=0.61, temperature=1.3),
]
