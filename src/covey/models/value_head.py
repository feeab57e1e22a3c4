"""Value models of a critic: a scalar head on the policy's trunk, or a network of its own.

M predictions of packed tokens have M values, each of the prefix before the token.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from covey.errors import out_of_memory
from covey.models.forward import decoder_of, embed_every_token, hidden_states
from covey.models.linear import ValueHead
from covey.models.load import source_of
from covey.models.logprobs import TokenOutputs
from covey.models.packing import Packed
from covey.models.policy import Policy
from covey.models.pretrained import classifier_on, load_pretrained, unreachable
from covey.models.sharded import Gathering, split_weights, unsplit
from covey_verify.errors import ConfigError


class ValueModel:
    """A value network apart from the policy: a transformers token classifier with one output."""

    def __init__(self, model: PreTrainedModel, rounds: bool) -> None:
        self.model = model.eval()
        embed_every_token(model)
        self.decoder = decoder_of(model)
        if rounds and self.decoder is not None and self.decoder.can_round:
            self.decoder.round_products()
        self.head = scalar_head(model)
        self.head.float()
        self.with_weights: Gathering = unsplit

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.head.weight.device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return list(self.model.parameters())

    def unsaved_weights(self) -> dict[str, Tensor]:
        """Weights by name that no model folder of a checkpoint has; here all weights."""
        return dict(self.model.named_parameters())

    def split(self) -> None:
        """Keep only this process's part of the weights."""
        split_weights(self)

    def update_unsharded(self) -> None:
        """Do nothing: nothing needs all weights before they are saved."""

    def heads(self) -> list[nn.Module]:
        """The one module that gives values."""
        return [self.head]

    def token_outputs(self, packed: Packed, *_: object) -> TokenOutputs:
        """The values before the predicted tokens, (M,); the rest is 0, since it predicts no tokens."""
        return self.with_weights(lambda: self._token_outputs(packed))

    def _token_outputs(self, packed: Packed) -> TokenOutputs:
        states = hidden_states(self.decoder, packed, self._states)
        # Copied, because FSDP warns of an output that is a view.
        values = self.head(states.float())[:, 0].clone()
        zeros = torch.zeros_like(values)
        return TokenOutputs(zeros, zeros, zeros, zeros, values)

    def _states(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Run padded tokens through the Hugging Face modules. (N, S) -> (N, S, D)."""
        out = self.model.base_model(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        return out.last_hidden_state


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that a classifier with one output ends with."""
    heads = [m for m in model.children() if isinstance(m, nn.Linear) and m.out_features == 1]
    if len(heads) != 1:
        raise ConfigError(f"critic: {type(model).__name__} must end with one linear layer of one output")
    return heads[0]


def add_value_head(policy: Policy) -> None:
    """Add a value head on the policy's hidden states. Raises ConfigError if these cannot be read."""
    if not policy.plain_head:
        raise ConfigError(
            f"algorithm.critic.trunk policy: {policy.model.config.model_type} changes the hidden states "
            "before its logits; use trunk own"
        )
    policy.value = ValueHead(policy.model.config.get_text_config().hidden_size, policy.device)


def value_model_from(policy: Policy) -> ValueModel:
    """A value model on a copy of the policy's trunk, with adapters merged and a head of 0."""
    language_model: PreTrainedModel = policy.model
    if policy.adapter is not None:
        language_model = copy.deepcopy(policy.adapter).merge_and_unload()
    return _on_trunk(language_model, None, policy.rounds)


def load_value_model(name: str, folder: Path, policy: Policy) -> ValueModel:
    """Load a value model from a folder or hub id: a classifier with one output, or a language model.

    Raises ConfigError for a model with another head or another vocabulary than the policy's.
    """
    loaders = {
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForTokenClassification": AutoModelForTokenClassification,
        "ForCausalLM": AutoModelForCausalLM,
    }
    try:
        source = source_of(name, folder)
        options = {"local_files_only": unreachable(source)}
        # The config's architecture decides the class, so that the head's weights are loaded too.
        kinds = AutoConfig.from_pretrained(source, trust_remote_code=False, **options).architectures or ["?"]
        loader = next((v for end, v in loaders.items() if kinds[0].endswith(end)), None)
        if loader is None:
            raise ConfigError(f"{kinds[0]} is neither a classifier nor a causal language model")
        model = load_pretrained(loader, source, dtype=policy.model.dtype, **options)
    except Exception as error:  # a damaged folder makes the libraries fail in any way
        if out_of_memory(error):
            raise
        raise ConfigError(f"algorithm.critic.model: {name!r}: {str(error).strip()[:500]}") from None
    model_size, policy_size = (m.config.get_text_config().vocab_size for m in (model, policy.model))
    if model_size != policy_size:
        raise ConfigError(
            f"algorithm.critic.model: {name!r} has {model_size} tokens, but the policy {policy_size}; a "
            "critic reads the policy's tokens, so use a model of the same family"
        )
    is_causal = loader is AutoModelForCausalLM
    if not is_causal and model.config.num_labels != 1:
        raise ConfigError(
            f"algorithm.critic.model: {name!r} returns {model.config.num_labels} numbers; a critic must "
            "return one"
        )
    return _on_trunk(model.to(policy.device), None if is_causal else scalar_head(model), policy.rounds)


def _on_trunk(language_model: PreTrainedModel, head: nn.Linear | None, rounds: bool) -> ValueModel:
    """A token classifier with the weights of a model's trunk and of ``head``, or of a head of 0."""
    try:
        model = classifier_on(AutoModelForTokenClassification, language_model)
    except ValueError as error:
        kind = language_model.config.model_type
        raise ConfigError(
            f"algorithm.critic.trunk own: transformers has no token classifier for {kind}; use trunk policy "
            f"({str(error)[:100]})"
        ) from None
    value_model = ValueModel(model.requires_grad_(True), rounds)
    if head is not None:
        with torch.no_grad():
            value_model.head.weight.copy_(head.weight)
            if value_model.head.bias is not None and head.bias is not None:
                value_model.head.bias.copy_(head.bias)
    return value_model
