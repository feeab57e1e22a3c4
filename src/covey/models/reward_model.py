"""Reward models in training: a trunk with a value head, saved as a transformers classifier."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.errors import CheckpointError
from covey.models.chat import chat_tokens
from covey.models.forward import decoder_of, embed_every_token
from covey.models.linear import FusedLinear
from covey.models.logprobs import TokenOutputs
from covey.models.packing import Packed
from covey.models.policy import Policy
from covey.models.pretrained import Loader, classifier_on, load_pretrained
from covey.models.sharded import unsplit
from covey.models.template import template_facts
from covey.system.opening import RECORD_BYTES, load_json, read_regular
from covey.tasks.files import TEMPLATE_COLUMNS
from covey_verify.errors import ConfigError
from covey_verify.types import Messages

if TYPE_CHECKING:
    from peft import PeftModel


class Classes(NamedTuple):
    """A transformers class, and the numbers of outputs that its head may have."""

    loader: Loader
    outputs: tuple[int, ...]


RewardModelKind = Literal["reward_model", "process_reward_model"]
CLASSES: dict[RewardModelKind, Classes] = {
    "reward_model": Classes(AutoModelForSequenceClassification, (1,)),
    "process_reward_model": Classes(AutoModelForTokenClassification, (1, 2)),
}
"""Kind of reward model -> the class that loads it and its possible outputs."""
SEPARATOR = "\n"
"""Text between the steps that a process reward model reads."""


class TrainedRewardModel(Policy):
    """A model whose log-probs are the head's values, one for each position that would predict a token.

    The value of a whole text is at the position that would predict its next token. So a batch for it has one
    more token after the text.
    """

    # No tokens are sampled from a reward model, so nothing is packed for sampling.
    packed_bytes = 0

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kind: RewardModelKind,
        adapter: PeftModel | None = None,
        reads_tokens: bool = False,
    ) -> None:
        """``reads_tokens``: rows that have tokens are read by these, not by their texts."""
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "model: the tokenizer of a reward model needs a pad_token; set one in its folder"
            )
        model.config.pad_token_id = tokenizer.pad_token_id  # where sequence heads look for the end
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.kind = kind
        self.reads_tokens = reads_tokens
        embed_every_token(model)
        self.loader_name = CLASSES[kind].loader.__name__
        self.decoder = decoder_of(model)
        self.rounds = False
        self.end_ids = list[int]()
        # Its states come from the trunk, without the head of the classifier.
        self.plain_head = True
        self.value = None
        self.with_weights = unsplit
        self.unsharded = self
        # Whatever is not under the trunk is the head; classes call it `score` or `classifier`.
        names = {name.partition(".")[0] for name, _ in model.named_parameters()} - {model.base_model_prefix}
        (self._name,) = names

    @property
    def bit_exact(self) -> bool:
        """Always false, as no log-prob is sampled from it."""
        return False

    def round_products(self) -> None:
        """Round the factors of the trunk's products, not of the head's. Raises ConfigError if it cannot."""
        self._round_trunk()

    def _linears(self) -> list[FusedLinear]:
        # The head is one of transformers' modules.
        return [] if self.decoder is None else self.decoder.linears

    def _load_saved(self, folder: Path) -> Mapping[str, Tensor]:
        return load_pretrained(CLASSES[self.kind].loader, folder, dtype=torch.float32).state_dict()

    def head(self, hidden: Tensor) -> Tensor:
        """Compute values from hidden states. (..., D) -> (...)."""
        values: Tensor = getattr(self.model, self._name)(hidden)
        # Of two outputs, incorrect and correct, the difference is the logit of correct.
        return values[..., 0] if values.shape[-1] == 1 else values[..., 1] - values[..., 0]

    def deep_copy(self) -> TrainedRewardModel:
        """A deep copy of the model."""
        model, adapter = copy.deepcopy((self.model, self.adapter))
        duplicate = TrainedRewardModel(model, self.tokenizer, self.kind, adapter)
        if self.rounds:
            duplicate.round_products()
        return duplicate

    def _token_outputs(self, packed: Packed, *_: object) -> TokenOutputs:
        """Return the values (M,) in place of the log-probs; the rest is 0."""
        values = self.head(self.hidden_states(packed)).float()
        zeros = torch.zeros_like(values)
        return TokenOutputs(values, zeros, zeros, zeros)


def with_head(policy: Policy, kind: RewardModelKind) -> TrainedRewardModel:
    """A reward model on the trunk of a language model; its head is 0, so that all texts have value 0."""
    if policy.adapter is not None:
        raise ConfigError("lora: all weights of a reward model are trained; remove lora")
    model = classifier_on(CLASSES[kind].loader, policy.model)
    reward_model = TrainedRewardModel(model, policy.tokenizer, kind)
    if policy.rounds:
        reward_model.round_products()
    return reward_model


def is_reward_model(folder: Path) -> bool:
    """Whether a folder holds a classifier, by the architectures in its config."""
    try:
        architectures = load_json(read_regular(folder / "config.json", RECORD_BYTES)).get("architectures")
    except (OSError, ValueError, AttributeError, CheckpointError):
        return False
    return "Classification" in str(architectures)


def shown_with(template: Mapping[str, object]) -> dict[str, object]:
    """The variables of a policy's chat template that belong to the conversation: its tools and documents.

    All others, such as `enable_thinking`, speak to the policy's own template.
    """
    return {name: template[name] for name in TEMPLATE_COLUMNS if name in template}


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    template: Mapping[str, object],
    begin: bool = True,
) -> list[int]:
    """Token ids of messages in the reward model's own template; no text forges a turn, as for a policy."""
    arguments = shown_with(template)
    return chat_tokens(tokenizer, messages, arguments, begin, template_facts(tokenizer, arguments).controls)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    answer: str | Messages,
    template: Mapping[str, object],
) -> list[int]:
    """Token ids of a prompt and its answer that a reward model reads. Raises the errors of ``chat_tokens``.

    ``template``: the variables of the problem's chat template; see ``shown_with``.

    Transformers' sequence heads read the last token that is not padding. Many tokenizers pad with their end
    of sequence, so for such heads a chat ends before its last token; that is removed here.
    """
    if isinstance(prompt, str):
        text = answer if isinstance(answer, str) else "".join(str(m["content"]) for m in answer)
        ids = list(tokenizer(prompt + text, add_special_tokens=True)["input_ids"])
    else:
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        ids = _chat_ids(tokenizer, [*prompt, *turns], template, begin=False)
    # What a sequence head would take for padding.
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids


def worked_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    steps: Sequence[str],
    separator: str,
    template: Mapping[str, object],
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and steps, each followed by ``separator``, and the index of each step's end.

    ``template``: as in ``conversation_ids``.
    """

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # Encoded in parts, so that a step's end is a token of its own; only the first has a beginning.
    if isinstance(prompt, str):
        first_id = tokenizer.bos_token_id
        ids = [*([] if first_id is None else [first_id]), *ids_of(prompt)]
    else:
        ids = _chat_ids(tokenizer, prompt, template)
    ends = []
    for step in steps:
        ids += [*ids_of(step.strip()), *ids_of(separator)]
        ends.append(len(ids) - 1)
    return ids, ends
