"""Reward models under training: a trunk with a head for values, saved as transformers' classes of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.errors import CheckpointError
from covey.models.chat import chat_text
from covey.models.forward import Decoder, embed_every_token, supported
from covey.models.logprobs import TokenScores
from covey.models.packing import Packed
from covey.models.policy import Policy
from covey.models.pretrained import LOADING, Loader, pretrained
from covey.models.sharded import unsplit
from covey.system.opening import RECORD_BYTES, load_json, read_regular
from covey_verify.errors import ConfigError
from covey_verify.types import Messages


class Classes(NamedTuple):
    """A class of transformers, and how many outputs its head may have."""

    loader: Loader
    outputs: tuple[int, ...]


Judges = Literal["reward_model", "process_reward_model"]
CLASSES: dict[Judges, Classes] = {
    "reward_model": Classes(AutoModelForSequenceClassification, (1,)),
    "process_reward_model": Classes(AutoModelForTokenClassification, (1, 2)),
}
"""Kind of reward model -> the class that loads it."""
SEPARATOR = "\n"
"""Between the steps that a process reward model reads."""


class TrainedRewardModel(Policy):
    """A model whose ``score`` is the head's value where a token would be predicted.

    The value of a whole text is read where its next token would be predicted: whoever makes the batch puts
    one token more behind it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: Judges) -> None:
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "model: a reward model needs a tokenizer with a pad_token; set one in its folder"
            )
        model.config.pad_token_id = tokenizer.pad_token_id  # where sequence heads look for the end
        self.model, self.tokenizer, self.adapter, self.kind = model.eval(), tokenizer, None, kind
        embed_every_token(model)
        self.loader_name = CLASSES[kind].loader.__name__
        self.decoder = Decoder(model) if supported(model) else None
        self.rounds = False
        self.end_ids, self.plain_head = list[int](), True  # it writes nothing that could end
        self.value = None
        self.around, self.whole = unsplit, self
        names = {name.partition(".")[0] for name, _ in model.named_parameters()} - {model.base_model_prefix}
        (self._name,) = names

    @property
    def bit_exact(self) -> bool:
        """Nothing is sampled from it."""
        return False

    def round_products(self) -> None:
        """Round the trunk's factors; the head's stay as they are. Raises ConfigError where that cannot be."""
        self._round_trunk()

    def _saved(self, folder: Path) -> Mapping[str, Tensor]:
        return pretrained(CLASSES[self.kind].loader, folder, dtype=torch.float32).state_dict()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) -> values (...)."""
        values: Tensor = getattr(self.model, self._name)(hidden)
        return values[..., 0] if values.shape[-1] == 1 else values[..., 1] - values[..., 0]

    def copied(self) -> TrainedRewardModel:
        """Another of the same weights."""
        made = TrainedRewardModel(copy.deepcopy(self.model), self.tokenizer, self.kind)
        if self.rounds:
            made.round_products()
        return made

    def _score(self, packed: Packed, *_: object) -> TokenScores:
        """The values (M,) in the place of the log-probs; all else is 0."""
        values = self.head(self.hidden(packed)).float()
        nothing = torch.zeros_like(values)
        return TokenScores(values, nothing, nothing, nothing)


def with_head(policy: Policy, kind: Judges) -> TrainedRewardModel:
    """A reward model on the trunk of a language model; its head begins at 0, so all texts are alike to it."""
    if policy.adapter is not None:
        raise ConfigError("lora: a reward model is trained on all its weights; leave lora out")
    config = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    with LOADING:
        model: PreTrainedModel = CLASSES[kind].loader.from_config(config, dtype=policy.model.dtype)
    model.base_model.load_state_dict(policy.model.base_model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{model.base_model_prefix}."):
                parameter.zero_()
    model.to(policy.device)
    made = TrainedRewardModel(model, policy.tokenizer, kind)
    if policy.rounds:
        made.round_products()
    return made


def is_reward_model(folder: Path) -> bool:
    """Whether a model's folder holds a model with a head for values."""
    try:
        named = load_json(read_regular(folder / "config.json", RECORD_BYTES)).get("architectures")
    except (OSError, ValueError, AttributeError, CheckpointError):
        return False
    return "Classification" in str(named)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, answer: str | Messages
) -> list[int]:
    """A prompt and its answer as far as a reward model reads them. Raises as ``chat_text``.

    Transformers' sequence heads read the last token that is no padding. Many tokenizers pad with their end of
    sequence, so that a chat's last token is none to them.
    """
    if isinstance(prompt, str):
        text = answer if isinstance(answer, str) else "".join(str(m["content"]) for m in answer)
        ids = list(tokenizer(prompt + text, add_special_tokens=True)["input_ids"])
    else:
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        whole = chat_text(tokenizer, [*prompt, *said], {}, begin=False)
        ids = list(tokenizer(whole, add_special_tokens=False)["input_ids"])
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids


def worked_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, steps: Sequence[str], separator: str
) -> tuple[list[int], list[int]]:
    """A prompt and steps, each closed by ``separator``: the ids, and where each step ends in them."""

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    if isinstance(prompt, str):
        begin = tokenizer.bos_token_id
        ids = [*([] if begin is None else [begin]), *ids_of(prompt)]
    else:
        ids = ids_of(chat_text(tokenizer, prompt, {}))
    ends = []
    for step in steps:
        ids += [*ids_of(step.strip()), *ids_of(separator)]
        ends.append(len(ids) - 1)
    return ids, ends
