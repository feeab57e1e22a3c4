"""The policy: a causal language model with its tokenizer, and its log-probs of packed tokens."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.errors import CheckpointError
from covey.models.chat import chat_tokens
from covey.models.compiled import score_compiled
from covey.models.forward import (
    LOGITS_CAP,
    Decoder,
    cap_of,
    embed_every_token,
    hidden_states,
    leave_images,
    supported,
    turned_alike,
)
from covey.models.linear import FusedLinear, ValueHead
from covey.models.logprobs import Head, TokenScores, score_tokens
from covey.models.ops import soft_cap
from covey.models.packing import Packed
from covey.models.pretrained import pretrained
from covey.models.sharded import Gathering, split_weights, take, unsplit, whole
from covey.models.template import template_facts
from covey.models.text import FaithfulText
from covey.models.written import check_folder
from covey_verify.errors import ConfigError
from covey_verify.types import Messages

if TYPE_CHECKING:
    from peft import PeftModel


class Policy:
    """A model that is sampled from and trained.

    ``model`` is the Hugging Face module, with LoRA layers in place if there are any; ``adapter``
    is peft's wrapper of it or None. With ``rounds`` products round their factors to bfloat16.
    Architectures that ``Decoder`` knows run through it, others
    through their Hugging Face modules.
    """

    loader_name = AutoModelForCausalLM.__name__
    """The class of transformers that loads its folder."""
    around: Gathering
    """What lets its weights be there for some work, where they are split over processes."""
    whole: Policy
    """A policy with all of its weights, to sample from and to save: itself, where they are not split."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        adapter: PeftModel | None = None,
        rounds: bool = False,
    ) -> None:
        self.model = model.eval()  # no dropout: the sampled distribution is the trained one
        embed_every_token(model)
        leave_images(model)
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.decoder = Decoder(model) if supported(model) else None
        self._head = FusedLinear(model.get_output_embeddings())
        self.rounds = False
        if rounds:
            self.round_products()
        self.turn_end = template_facts(tokenizer).turn_end
        self.end_ids = end_ids(model, tokenizer, self.turn_end)
        self.plain_head = self.decoder is not None or self._head_explains_logits()
        self.value: ValueHead | None = None
        self.around, self.whole = unsplit, self

    def round_products(self) -> None:
        """Round the products' factors to bfloat16 from now on. Raises ConfigError where that cannot be."""
        self._round_trunk()
        self._head.rounds = True

    def _round_trunk(self) -> None:
        if self.decoder is None:
            raise ConfigError(
                "precision: bfloat16 is for families of models in our own forward (docs/performance.md)"
            )
        self.decoder.round_products()
        self.rounds = True

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.get_input_embeddings().weight.device

    @property
    def context(self) -> int:
        """The longest sequence the model can read, and turns alike wherever it is read, in tokens."""
        config = self.model.config.get_text_config()
        return turned_alike(config) or int(getattr(config, "max_position_embeddings", 1 << 20))

    @property
    def reads(self) -> str:
        """Its context in words, and why that is less than its config says, if it is."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", 0)
        said = f"{self.context} tokens"
        if longest <= self.context:
            return said
        return (
            f"{said} (of {longest}: longer sequences are turned by another table, so that a token would be "
            "sampled by one and trained by the other; longrope: long turns all by that of long ones)"
        )

    @property
    def bit_exact(self) -> bool:
        """Whether a log-prob recorded while sampling is the bits that ``score`` finds."""
        return self.decoder is not None and self.decoder.bit_exact and self._head.plain

    @property
    def rounded(self) -> bool:
        """Whether its numbers are coarser than float32's: weights are, or the factors of products."""
        return self.rounds or any(p.dtype != torch.float32 for p in self.model.parameters())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def unsaved(self) -> dict[str, Tensor]:
        """Weights by name that its model folder does not have: those of the value head."""
        return {} if self.value is None else dict(self.value.named_parameters())

    def encode(self, prompt: str | Messages, template: Mapping[str, object] | None = None) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template with its arguments.

        Some tokenizers put an end behind every text (`add_eos_token`); one that is to be continued has none,
        and one that begins as the tokenizer begins every text is not begun twice.
        """
        if not isinstance(prompt, str):
            return self.conversation(prompt, template or {}, begin=True)
        ids = list(self.tokenizer(prompt)["input_ids"])
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids = ids[1:]  # a prompt that a template was applied to has one already
        if ids and ids[-1] in self.end_ids:
            plain = list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
            return ids[:-1] if ids[-1 - len(plain) : -1] == plain else ids
        return ids

    def conversation(self, messages: Messages, template: Mapping[str, object], begin: bool) -> list[int]:
        """Token ids of messages, with ``begin`` up to where the assistant begins.

        No content can forge the template's own words: there they are encoded as letters.
        """
        controls = template_facts(self.tokenizer, template).controls
        return chat_tokens(self.tokenizer, messages, template, begin, controls)

    @property
    def end_id(self) -> int:
        """What a text of its own ends with: the tokenizer's end of sequence, or the first that ends one."""
        own = self.tokenizer.eos_token_id
        return self.end_ids[0] if own is None else own

    @property
    def words(self) -> int:
        """Ids below it are words of the tokenizer's. Many models have more, to pad their embedding."""
        return min(self.embedded, 1 + max(self.tokenizer.get_vocab().values(), default=0))

    @cached_property
    def known(self) -> int:
        """Ids below it may be drawn: those of words. Others, which nobody can read, are neither drawn nor
        counted in a log-prob, but where servers sample, which draw from all.
        """
        return self.words

    def draw_from_all(self) -> None:
        """Let every id be drawn that the model has an embedding of, as servers do."""
        self.known = self.whole.known = self.embedded

    @property
    def embedded(self) -> int:
        """How many ids the model has an embedding of."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @cached_property
    def vocabulary_hash(self) -> str:
        """Of what each token id stands for: the same for tokenizers whose ids mean the same."""
        words = sorted((n, word) for word, n in self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]

    def load_weights(self, folder: Path) -> None:
        """Take the weights of a checkpoint folder; its adapter's if this policy trains one.

        Raises CheckpointError, and keeps the weights it has, where these are of another shape.
        """
        if self.whole is not self:
            self.whole.load_weights(folder)
            for part, weight in zip(self.model.parameters(), self.whole.model.parameters(), strict=True):
                take(part, weight)
            return
        if self.adapter is not None:
            from peft import set_peft_model_state_dict
            from safetensors.torch import load_file

            set_peft_model_state_dict(self.adapter, load_file(folder / "adapter_model.safetensors"))
            return
        saved = self._saved(folder)
        if _shapes(saved) != _shapes(self.model.state_dict()):
            raise CheckpointError(f"{folder} holds another model than the one at work")
        self.model.load_state_dict(saved)

    def _saved(self, folder: Path) -> Mapping[str, Tensor]:
        return pretrained(AutoModelForCausalLM, folder, dtype=torch.float32).state_dict()

    def copied(self) -> Policy:
        """Another of the same weights."""
        adapter = copy.deepcopy(self.adapter)
        model = copy.deepcopy(self.model) if adapter is None else adapter.get_base_model()
        made = Policy(model, self.tokenizer, adapter, self.rounds)
        made.known = self.known
        return made

    def unrounded(self) -> Policy:
        """The same weights, not copied, with products that round nothing."""
        made = Policy(self.model, self.tokenizer, self.adapter)
        made.known = self.known
        return made

    def split(self) -> None:
        """Leave this process its part of the weights, and a copy of them all as of the last ``settle``."""
        self.whole = self.copied()
        split_weights(self)

    @torch.no_grad()
    def settle(self) -> None:
        """Let ``whole`` have the present weights. Every process has to."""
        for into, part in zip(self.whole.parameters, self.parameters, strict=True):
            if into is not part:
                into.copy_(whole(part))

    def heads(self) -> list[nn.Module]:
        """Modules for values."""
        return [] if self.value is None else [self.value]

    @cached_property
    def decode(self) -> FaithfulText:
        """Gives the text of a completion: special tokens kept, its end left out."""
        return FaithfulText(self.tokenizer, self.end_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) -> logits (..., V)."""
        if self.decoder is not None:
            logits, cap = self.decoder.ops.linear(self._head, hidden), self.decoder.logits_cap
            return logits if cap is None else self.decoder.ops.soft_cap(logits, cap)
        if not self.plain_head:
            return hidden  # ``hidden`` is already the logits
        head, cap = self.model.get_output_embeddings(), cap_of(self.model.config, LOGITS_CAP)
        logits = head(hidden.to(head.weight.dtype))  # some models keep their residual stream in float32
        return logits if cap is None else soft_cap(logits, cap)

    def hidden(self, packed: Packed) -> Tensor:
        """The hidden states that predict: (M, D)."""
        return hidden_states(self.decoder, packed, self._states)

    def score(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None = None
    ) -> TokenScores:
        """Log-prob, entropy, ... of every predicted token, (M,).

        ``reference`` is another model's ``hidden`` and ``head``, for the exact KL to it.
        """
        return self.around(lambda: self._score(packed, temperature, reference))

    def _score(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None
    ) -> TokenScores:
        hidden, mask = self.hidden(packed), packed.sampling_mask
        if self.decoder is not None and self.decoder.ops.compiled and self._head.plain and reference is None:
            cap = self.decoder.logits_cap
            scores = score_compiled(hidden, self._head, packed.targets, temperature, mask, cap, self.known)
        else:
            scores = score_tokens(hidden, self.head, packed.targets, temperature, reference, mask, self.known)
        return scores._replace(values=None if self.value is None else self.value(hidden))

    def _states(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, S) padded tokens through the Hugging Face modules -> (N, S, D), or logits."""
        model = _trunk(self.model) if self.plain_head else self.model
        out = model(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        return out.last_hidden_state if self.plain_head else out.logits

    @torch.no_grad()
    def _head_explains_logits(self) -> bool:
        """Whether head(hidden) gives this architecture's logits; some scale them on the way."""
        self.plain_head = _trunk(self.model) is not self.model
        if self.device.type == "meta":  # a skeleton has no numbers to compare
            return self.plain_head
        tokens = torch.tensor([[0, 1, 2, 3]], device=self.device)
        expected = self.model(input_ids=tokens, use_cache=False).logits
        found = self.head(self._states(tokens, torch.ones_like(tokens)))
        return bool(torch.allclose(expected.float(), found.float(), rtol=1e-4, atol=1e-4))


def snapshot(policy: Policy) -> Policy:
    """A copy to sample from while the policy is trained; what is not trained is shared."""
    frozen = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    model, adapter = copy.deepcopy((policy.model, policy.adapter), frozen)
    made = Policy(model.requires_grad_(False), policy.tokenizer, adapter, policy.rounds)
    made.known = policy.known
    return made


@torch.no_grad()
def copy_trained(policy: Policy, into: Policy) -> None:
    """Give a snapshot the weights that the policy has now."""
    for mine, theirs in zip(into.model.parameters(), policy.model.parameters(), strict=True):
        if theirs.requires_grad:
            mine.copy_(theirs)


def _trunk(model: PreTrainedModel) -> PreTrainedModel:
    """What computes the hidden states below a model's head; the model itself where nothing can be told."""
    # Llama 4's `base_model_prefix` is that of the model with images around it.
    below = [m for m in (model.base_model, *model.children()) if isinstance(m, PreTrainedModel)]
    return next((m for m in below if m is not model), model)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turn_ends: int | None) -> list[int]:
    """Ids that end a completion: the tokenizer's, those of the generation config, the chat template's."""
    others = (tokenizer.eos_token_id, turn_ends)
    return sorted({*_configured_ends(model), *(i for i in others if i is not None)})


def _generation_config(model: PreTrainedModel) -> GenerationConfig | None:
    """None of models that `generate` does not know: reward models, and those of a user's own code."""
    return getattr(model, "generation_config", None)


def _configured_ends(model: PreTrainedModel) -> set[int]:
    configured = getattr(_generation_config(model), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {i for i in ids if i is not None}


def save_policy(policy: Policy, folder: Path, merged: bool = True) -> None:
    """Write a folder that `from_pretrained` loads.

    Adapters are merged into the weights and kept in `adapter/`; without ``merged`` they are
    written alone, which is smaller and loads where peft is installed. Whoever samples from it stops where
    covey has.
    """
    configured = _generation_config(policy.model)
    if configured is not None and _configured_ends(policy.model) != set(policy.end_ids):
        configured.eos_token_id = policy.end_ids
    policy.tokenizer.save_pretrained(folder)
    if policy.adapter is None:
        policy.model.save_pretrained(folder)
        check_folder(folder, policy.model.state_dict())
    elif merged:
        policy.adapter.save_pretrained(folder / "adapter")
        model = copy.deepcopy(policy.adapter).merge_and_unload()
        model.save_pretrained(folder)
        check_folder(folder, model.state_dict())
    else:
        from peft import get_peft_model_state_dict

        policy.adapter.save_pretrained(folder)
        check_folder(folder, get_peft_model_state_dict(policy.adapter))


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """sha256 over weights by name."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
