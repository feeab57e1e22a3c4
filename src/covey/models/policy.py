"""The policy: a causal language model with its tokenizer, its log-probs of packed tokens, and its folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.errors import CheckpointError
from covey.models.chat import chat_tokens
from covey.models.compiled import compiled_token_outputs
from covey.models.ends import configured_ends, end_ids, generation_config
from covey.models.forward import (
    LOGITS_CAP,
    Decoder,
    cap_of,
    decoder_of,
    embed_every_token,
    hidden_states,
    leave_images,
)
from covey.models.hashes import vocabulary_hash
from covey.models.linear import FusedLinear, ValueHead
from covey.models.logits import logits_of
from covey.models.logprobs import Head, TokenOutputs, token_outputs
from covey.models.ops import soft_cap
from covey.models.packing import Packed, pack
from covey.models.pretrained import load_pretrained
from covey.models.readback import check_folder
from covey.models.rotary import longest_stable_rotation
from covey.models.sharded import Gathering, copy_into, full_tensor, split_weights, unsplit
from covey.models.template import template_facts
from covey.models.text import FaithfulText
from covey_verify.errors import ConfigError
from covey_verify.types import Messages

if TYPE_CHECKING:
    from peft import PeftModel


class Policy:
    """A model that is sampled from and trained.

    ``model`` is the Hugging Face module, with LoRA layers in place if there are any; ``adapter`` is peft's
    wrapper of it or None. With ``rounds`` products round their factors to bfloat16. Architectures that
    ``Decoder`` knows run through it, others through their Hugging Face modules.
    """

    loader_name = AutoModelForCausalLM.__name__
    """Name of the transformers class that loads its folder."""
    with_weights: Gathering
    """Runs some work while all weights are gathered, if they are split over processes."""
    unsharded: Policy
    """A policy with all weights, as of the last ``update_unsharded``, to sample from and to save.

    It is this policy itself if weights are not split over processes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        adapter: PeftModel | None = None,
        rounds: bool = False,
        through_modules: bool | None = None,
    ) -> None:
        """``through_modules``: run the model's own modules, not our forward pass; None: find out.

        A copy is told what the original does, since training may have made rounding errors larger.
        """
        self.model = model.eval()  # no dropout: the sampled distribution is the trained one
        embed_every_token(model)
        leave_images(model)
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.decoder: Decoder | None = None
        self._head = FusedLinear(model.get_output_embeddings())
        if not through_modules:
            self.decoder = decoder_of(model)
            # A subclass, hook or replaced layer can make a model compute something its type does not imply.
            if self.decoder and through_modules is None and not self._decoder_explains_logits():
                self.decoder = None
        self.rounds = False
        if rounds:
            self.round_products()
        self.turn_end = template_facts(tokenizer).turn_end
        self.end_ids = end_ids(model, tokenizer, self.turn_end)
        # Our decoder applies all factors itself; other models are compared with their own logits.
        self.plain_head = self.decoder is not None or self._head_explains_logits()
        self.value: ValueHead | None = None
        self.with_weights = unsplit
        self.unsharded = self

    def round_products(self) -> None:
        """Round the products' factors to bfloat16 from now on. Raises ConfigError if they cannot be."""
        self._round_trunk()
        self._head.rounds = True

    def _round_trunk(self) -> None:
        if self.decoder is None:
            raise ConfigError(
                "precision: bfloat16 works only for models that run in covey's own forward pass "
                "(docs/performance.md)"
            )
        self.decoder.round_products()
        self.rounds = True

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.get_input_embeddings().weight.device

    @property
    def context(self) -> int:
        """Longest sequence, in tokens, that the model reads the same way in sampling and in training."""
        config = self.model.config.get_text_config()
        return longest_stable_rotation(config) or int(getattr(config, "max_position_embeddings", 1 << 20))

    @property
    def context_in_words(self) -> str:
        """The context in words, with the reason if it is less than the config says."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", 0)
        words = f"{self.context} tokens"
        if longest <= self.context:
            return words
        return (
            f"{words} (of {longest}: longer sequences use another rotary table, so a token would be sampled "
            "by one and trained by the other; longrope: long uses the long one for all)"
        )

    @property
    def bit_exact(self) -> bool:
        """Whether a log-prob recorded while sampling has the same bits that ``token_outputs`` computes."""
        return self.decoder is not None and self.decoder.bit_exact and self._head.plain

    @property
    def rounded(self) -> bool:
        """Whether it computes with less precision than float32, in weights or in factors of products."""
        return self.rounds or any(p.dtype != torch.float32 for p in self.model.parameters())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def unsaved_weights(self) -> dict[str, Tensor]:
        """Weights that the model folder lacks, by name: the value head's weights."""
        return {} if self.value is None else dict(self.value.named_parameters())

    def encode(self, prompt: str | Messages, template: Mapping[str, object] | None = None) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template with its arguments.

        Some tokenizers put an end after every text (`add_eos_token`); it is removed, since the model is to
        continue the prompt. A beginning of sequence that the prompt already has is not put there twice.
        """
        if not isinstance(prompt, str):
            return self.conversation(prompt, template or {}, begin=True)
        ids = list(self.tokenizer(prompt)["input_ids"])
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids = ids[1:]  # the template has added this token already
        if ids and ids[-1] in self.end_ids:
            # Remove the end only if the tokenizer added it: a prompt may end with that token itself.
            bare_ids = list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
            return ids[:-1] if ids[-1 - len(bare_ids) : -1] == bare_ids else ids
        return ids

    def conversation(self, messages: Messages, template: Mapping[str, object], begin: bool) -> list[int]:
        """Token ids of messages, with ``begin`` up to where the assistant begins.

        No content can forge the template's own words: within contents they are encoded as letters.
        """
        controls = template_facts(self.tokenizer, template).controls
        return chat_tokens(self.tokenizer, messages, template, begin, controls)

    @property
    def end_id(self) -> int:
        """The id that ends a plain text: the tokenizer's end of sequence, else the first of ``end_ids``."""
        end_of_sequence = self.tokenizer.eos_token_id
        return self.end_ids[0] if end_of_sequence is None else end_of_sequence

    @property
    def word_ids(self) -> int:
        """Ids below this number are the tokenizer's words. Many models have more, which pad the embedding."""
        return min(self.embedded, 1 + max(self.tokenizer.get_vocab().values(), default=0))

    @cached_property
    def drawable_ids(self) -> int:
        """Ids below this number may be drawn: they belong to words.

        Padding ids mean nothing, so they are neither drawn nor part of a log-prob's softmax. Only if servers
        sample, which draw from all ids, do they count.
        """
        return self.word_ids

    def draw_from_all(self) -> None:
        """Let every id with an embedding be drawn, as servers do."""
        self.drawable_ids = self.unsharded.drawable_ids = self.embedded

    @property
    def embedded(self) -> int:
        """Number of ids with an embedding."""
        return len(self.model.get_input_embeddings().weight)  # an embedding with an adapter has it too

    @cached_property
    def vocabulary_hash(self) -> str:
        """Hash of the words of all token ids; equal for tokenizers whose ids mean the same."""
        return vocabulary_hash(self.tokenizer)

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint folder, or its adapter's if this policy trains one.

        Raises CheckpointError, and keeps the present weights, if the folder's have another shape.
        """
        if self.unsharded is not self:  # split: load all weights, then take this process's part of each
            self.unsharded.load_weights(folder)
            for part, whole in zip(self.model.parameters(), self.unsharded.model.parameters(), strict=True):
                copy_into(part, whole)
            return
        if self.adapter is not None:
            from peft import set_peft_model_state_dict
            from safetensors.torch import load_file

            set_peft_model_state_dict(self.adapter, load_file(folder / "adapter_model.safetensors"))
            return
        weights = self._load_saved(folder)
        if _shapes(weights) != _shapes(self.model.state_dict()):
            raise CheckpointError(f"{folder} holds another model than the one in use")
        self.model.load_state_dict(weights)

    def _load_saved(self, folder: Path) -> Mapping[str, Tensor]:
        return load_pretrained(AutoModelForCausalLM, folder, dtype=torch.float32).state_dict()

    def with_model(self, model: PreTrainedModel, adapter: PeftModel | None, rounds: bool) -> Policy:
        """A policy that computes with another module as this one does with its own."""
        policy = Policy(model, self.tokenizer, adapter, rounds, through_modules=self.decoder is None)
        policy.drawable_ids = self.drawable_ids
        return policy

    def deep_copy(self) -> Policy:
        """A deep copy of the policy."""
        return self.with_model(*copy.deepcopy((self.model, self.adapter)), self.rounds)

    def without_rounding(self) -> Policy:
        """A policy on the same weights, not copied, whose products do not round."""
        return self.with_model(self.model, self.adapter, rounds=False)

    def snapshot(self) -> Policy:
        """A copy to sample from while this policy is trained; frozen weights are shared."""
        # deepcopy takes what its memo has under an object's id for the copy: frozen weights stay themselves.
        frozen = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        model, adapter = copy.deepcopy((self.model, self.adapter), frozen)
        return self.with_model(model.requires_grad_(False), adapter, self.rounds)

    def split(self) -> None:
        """Keep only this process's part of the weights, and ``unsharded``, a copy of them all."""
        self.unsharded = self.deep_copy()
        split_weights(self)

    @torch.no_grad()
    def update_unsharded(self) -> None:
        """Gather the present weights into ``unsharded``; all processes do this at once."""
        for whole, part in zip(self.unsharded.parameters, self.parameters, strict=True):
            if whole is not part:  # an unsplit policy is its own unsharded one
                whole.copy_(full_tensor(part))

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copies of weights that the compiled operations multiply by when they sample."""
        if self.decoder is None or not self.decoder.ops.compiled:
            return 0
        weights = [m.weight for linear in self._linears() if linear.is_product for m in linear.modules]
        return sum(w.numel() * (2 if self.rounds else w.element_size()) for w in weights)

    @property
    def adapters_apart(self) -> bool:
        """Whether peft's modules add the adapters to products, in float32; our products include them."""
        if self.decoder is None or not self.decoder.ops.compiled:
            return self.adapter is not None
        return not all(linear.is_product for linear in self._linears())

    def drop_packed(self) -> None:
        """Free these copies until the next sampling."""
        for linear in self._linears():
            linear.drop_packed()

    def stop_packing(self) -> None:
        """Keep no such copies from now on, of a model that nothing samples from."""
        for linear in self._linears():
            linear.fleeting = True

    def _linears(self) -> list[FusedLinear]:
        return [self._head] if self.decoder is None else [*self.decoder.linears, self._head]

    def heads(self) -> list[nn.Module]:
        """The modules that give values."""
        return [] if self.value is None else [self.value]

    @cached_property
    def decode(self) -> FaithfulText:
        """Decoder of completions: special tokens are kept, the end is left out."""
        return FaithfulText(self.tokenizer, self.end_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits from hidden states. (..., D) -> (..., V)."""
        if self.decoder is not None:
            logits = self.decoder.ops.logits(self._head, hidden)
            cap = self.decoder.logits_cap
            return logits if cap is None else self.decoder.ops.soft_cap(logits, cap)
        if not self.plain_head:
            return hidden  # the modules have computed logits already
        head = self.model.get_output_embeddings()
        cap = cap_of(self.model.config, LOGITS_CAP)
        # Some models keep their residual stream in float32.
        logits = logits_of(head, hidden.to(head.weight.dtype))
        return logits if cap is None else soft_cap(logits, cap)

    def hidden_states(self, packed: Packed) -> Tensor:
        """The hidden states from which the M tokens are predicted: (M, D)."""
        return hidden_states(self.decoder, packed, self._states)

    def token_outputs(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None = None
    ) -> TokenOutputs:
        """Log-prob, entropy and so on of every predicted token, (M,).

        ``reference`` is another model's ``hidden`` and ``head``, for the exact KL to it.
        """
        return self.with_weights(lambda: self._token_outputs(packed, temperature, reference))

    def _token_outputs(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None
    ) -> TokenOutputs:
        hidden = self.hidden_states(packed)
        targets = packed.targets
        mask = packed.sampling_mask
        ids = self.drawable_ids
        # The compiled head knows no second model and no adapter, so the exact KL goes through torch.
        if self.decoder is not None and self.decoder.ops.compiled and self._head.plain and reference is None:
            cap = self.decoder.logits_cap
            outputs = compiled_token_outputs(hidden, self._head, targets, temperature, mask, cap, ids)
        else:
            outputs = token_outputs(hidden, self.head, targets, temperature, reference, mask, ids)
        return outputs._replace(values=None if self.value is None else self.value(hidden))

    def _states(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Run padded tokens through the Hugging Face modules. (N, S) -> (N, S, D), or logits (N, S, V)."""
        model = _trunk(self.model) if self.plain_head else self.model
        out = model(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        return out.last_hidden_state if self.plain_head else out.logits

    # With gradients, products keep no packed copy of the weights, which nothing would need afterwards.
    @torch.enable_grad()
    def _decoder_explains_logits(self) -> bool:
        """Whether our own forward pass gives this model's distributions, up to rounding."""
        if getattr(self.model.get_output_embeddings(), "bias", None) is not None:
            return False  # the gradient of a bias is not computed
        tokens = np.arange(min(8, self.embedded))
        ids = torch.from_numpy(tokens)[None].to(self.device)
        expected = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().softmax(-1)
        packed = pack([tokens[:1]], [[tokens[1:]]]).to(self.device)
        computed = self.head(self.hidden_states(packed)).float().softmax(-1)
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.2
        # Broken weights give NaN either way, and are reported where they are read.
        return bool(torch.allclose(expected, computed, atol=tolerance, equal_nan=True))

    @torch.no_grad()
    def _head_explains_logits(self) -> bool:
        """Whether head(hidden) gives this architecture's logits; some scale them on the way."""
        # `_states` and `head` read this attribute, so it has to hold what is tried.
        self.plain_head = _trunk(self.model) is not self.model
        tokens = torch.tensor([[0, 1, 2, 3]], device=self.device)
        expected = self.model(input_ids=tokens, use_cache=False).logits
        computed = self.head(self._states(tokens, torch.ones_like(tokens)))
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 2e-2  # in bfloat16 the modules round
        return bool(torch.allclose(expected.float(), computed.float(), rtol=tolerance, atol=tolerance))


@torch.no_grad()
def copy_trained(policy: Policy, duplicate: Policy) -> None:
    """Copy the policy's present trained weights into a snapshot."""
    for copied, weight in zip(duplicate.model.parameters(), policy.model.parameters(), strict=True):
        if weight.requires_grad:
            copied.copy_(weight)


def _trunk(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model below its head; the model itself if there is no such part."""
    # Llama 4's `base_model_prefix` names the model with image inputs around it.
    parts = [m for m in (model.base_model, *model.children()) if isinstance(m, PreTrainedModel)]
    return next((m for m in parts if m is not model), model)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def save_policy(policy: Policy, folder: Path, merged: bool = True) -> None:
    """Write a folder that `from_pretrained` loads.

    Adapters are merged into the weights and also kept in `adapter/`. Without ``merged`` they are written
    alone, which is smaller and loads where peft is installed.
    """
    # Other programs that sample from the folder should stop at the same tokens.
    configured = generation_config(policy.model)
    if configured is not None and configured_ends(policy.model) != set(policy.end_ids):
        configured.eos_token_id = policy.end_ids
    policy.tokenizer.save_pretrained(folder)
    if policy.adapter is None:
        policy.model.save_pretrained(folder)
        check_folder(folder, policy.model.state_dict())
    elif merged:
        policy.adapter.save_pretrained(folder / "adapter")
        policy.drop_packed()  # frees memory for the copy
        model = copy.deepcopy(policy.adapter).merge_and_unload()
        model.save_pretrained(folder)
        check_folder(folder, model.state_dict())
    else:
        from peft import get_peft_model_state_dict

        policy.adapter.save_pretrained(folder)
        check_folder(folder, get_peft_model_state_dict(policy.adapter))
