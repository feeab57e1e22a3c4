"""Values of prefixes: what a head or a network of its own says, beside transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
)

from covey.models.packing import pack
from covey.models.value_head import ValueModel, add_value_head, load_value_model, value_model_from
from covey_verify.errors import ConfigError
from tests.conftest import SMALL, policy_of

PROMPTS = [np.array([3, 4, 5]), np.array([6])]
COMPLETIONS = [[np.array([7, 8, 9]), np.array([10])], [np.array([11, 12])]]


@torch.no_grad()
def expected(model: Any) -> list[float]:
    """Each prefix alone through the classifier, read at its last token."""
    values = []
    for prompt, answers in zip(PROMPTS, COMPLETIONS, strict=True):
        for answer in answers:
            for length in range(len(answer)):
                ids = torch.tensor([[*prompt, *answer[:length]]])
                values.append(float(model(input_ids=ids).logits[0, -1, 0]))
    return values


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "gemma", "gemma2"])
def test_a_network_of_its_own_gives_what_its_classifier_gives(kind: str, tmp_path: Path) -> None:
    policy = policy_of(kind)
    critic = value_model_from(policy)
    packed = pack(PROMPTS, COMPLETIONS)
    assert not critic.token_outputs(packed, 1.0).values.any()  # before it has learned
    with torch.no_grad():
        critic.head.weight.normal_()
        critic.head.bias.fill_(0.3)
    values = critic.token_outputs(packed, 1.0).values
    assert values.tolist() == pytest.approx(expected(critic.model), abs=1e-4)
    critic.model.save_pretrained(tmp_path / "critic")
    same = load_value_model("critic", tmp_path, policy)
    assert torch.equal(same.token_outputs(packed, 1.0).values, values)
    assert isinstance(same, ValueModel)


def test_a_head_on_the_policy_reads_its_states_and_pulls_on_them_as_asked() -> None:
    policy = policy_of("qwen3")
    packed = pack(PROMPTS, COMPLETIONS)
    assert policy.token_outputs(packed, 1.0).values is None
    add_value_head(policy)
    with torch.no_grad():
        policy.value.weight.normal_()
    own = value_model_from(policy)
    with torch.no_grad():
        own.head.weight.copy_(policy.value.weight)
    assert policy.token_outputs(packed, 1.0).values.tolist() == pytest.approx(
        own.token_outputs(packed, 1.0).values.tolist()
    )
    gradients = {}
    for pull in (0.0, 0.25, 1.0):
        policy.value.pull = pull
        policy.model.zero_grad()
        policy.value.zero_grad()
        policy.token_outputs(packed, 1.0).values.square().sum().backward()
        grads = [p.grad for p in policy.model.parameters() if p.grad is not None]
        gradients[pull] = float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0
        assert policy.value.weight.grad.any()
    assert gradients[0.0] == 0.0
    assert gradients[0.25] == pytest.approx(gradients[1.0] / 4)


def test_a_reward_model_becomes_a_critic_with_its_head(tmp_path: Path) -> None:
    policy = policy_of("qwen3")
    config = Qwen3Config(**SMALL, head_dim=32, num_labels=1)
    judge = AutoModelForSequenceClassification.from_config(config).eval()
    judge.save_pretrained(tmp_path / "judge")
    critic = load_value_model("judge", tmp_path, policy)
    whole = torch.tensor([[3, 4, 5, 7, 8]])
    said = float(judge(input_ids=whole).logits[0, 0].detach())
    values = critic.token_outputs(pack(PROMPTS, COMPLETIONS), 1.0).values
    assert values[2].item() == pytest.approx(said, abs=1e-5)


def test_a_critic_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    policy = policy_of("qwen3")
    two = AutoModelForTokenClassification.from_config(Qwen3Config(**SMALL, head_dim=32, num_labels=2))
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"critic\.model: 'two' returns 2 numbers"):
        load_value_model("two", tmp_path, policy)
    other = AutoModelForCausalLM.from_config(Qwen3Config(**{**SMALL, "vocab_size": 96}, head_dim=32))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="96 tokens, but the policy 300"):
        load_value_model("other", tmp_path, policy)
    with pytest.raises(ConfigError, match=r"critic\.model: './none'"):
        load_value_model("./none", tmp_path, policy)
