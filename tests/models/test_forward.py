"""Our forward computes what the Hugging Face model computes, packed or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covey.models.forward import supported
from covey.models.packing import pack
from covey.models.policy import Policy
from tests.conftest import CONFIGS, OTHERS, OURS, policy_of, random_prompts, sharpened


def reference_logprobs(model: torch.nn.Module, prompt: np.ndarray, answer: np.ndarray) -> torch.Tensor:
    """Log-probs of the answer from one plain unpadded forward of the Hugging Face model."""
    tokens = torch.tensor(np.concatenate((prompt, answer)))[None]
    logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("name", OURS)
def test_logits_equal_those_of_the_hugging_face_model(name: str) -> None:
    model = sharpened(CONFIGS[name])
    policy = Policy(model, policy_of("qwen3").tokenizer)
    assert policy.decoder is not None
    tokens = random_prompts(40)[0]
    packed = pack([tokens[:1]], [[np.append(tokens[1:], 7)]])
    with torch.no_grad():
        ours = policy.head(policy.hidden(packed))
        theirs = model(torch.tensor(tokens)[None]).logits[0]
    assert float(theirs.std()) > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OURS + OTHERS)
def test_shared_prompts_of_ragged_groups_score_like_single_sequences(name: str) -> None:
    policy = policy_of(name)
    prompts = random_prompts(3, 17, 1)
    answers = [random_prompts(9, 1, 30, seed=1), [], random_prompts(2, 11, seed=2)]
    packed = pack(prompts, answers)
    scores = packed.unpack(policy.score(packed, temperature=1.0).logprobs)
    row = 0
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            expected = reference_logprobs(policy.model, prompt, answer)
            torch.testing.assert_close(scores[row, : len(answer)], expected, atol=1e-5, rtol=1e-5)
            assert not scores[row, len(answer) :].any()
            row += 1
    assert row == len(scores)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_gradient_is_that_of_single_sequences(name: str) -> None:
    policy = policy_of(name)
    prompts, answers = random_prompts(5, 8), [random_prompts(6, 3, seed=1), random_prompts(4, seed=2)]
    policy.score(pack(prompts, answers), temperature=1.0).logprobs.sum().backward()
    ours = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            reference_logprobs(policy.model, prompt, answer).sum().backward()
    for n, p in policy.model.named_parameters():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(ours[n] / scale, p.grad / scale, atol=1e-5, rtol=0, msg=n)


def test_unknown_architectures_and_active_sliding_windows_are_not_ours() -> None:
    assert not supported(sharpened(CONFIGS["gpt2"]))
    window = type(CONFIGS["mistral"])(**{**CONFIGS["mistral"].to_dict(), "sliding_window": 8})
    assert not supported(sharpened(window))


def test_prompts_are_computed_once() -> None:
    prompt = random_prompts(50)[0]
    packed = pack([prompt], [random_prompts(4, 4, 4, 4)])
    assert len(packed.tokens) == 50 + 4 * 3


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_recomputed_layers_give_the_same_gradient_to_the_bit(name: str) -> None:
    policy = policy_of(name)
    packed = pack(random_prompts(5, 9), [random_prompts(7, 3, seed=1), random_prompts(4, seed=2)])
    gradients = []
    for recompute in (False, True):
        policy.decoder.recompute = recompute
        policy.model.zero_grad()
        policy.score(packed, 1.0).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))
