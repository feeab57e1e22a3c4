"""Decoding through the Hugging Face modules: any architecture, correct and slower.

Prompts are left-padded and repeated; a batch runs until all its completions have ended.
Architectures differ in what they store from token to token, and in whether padding changes it. So each is
tried before it is sampled from (``check_sampling``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from covey.errors import out_of_memory
from covey.models.live_memory import alive_bytes
from covey.models.policy import Policy
from covey.sampling.compaction import Compaction
from covey_verify.errors import ConfigError, CoveyError

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument: of transformers 5.24 and later, and of older ones with attention or states."""
NO_CACHE = (
    "its modules return no transformers cache, so every token would need a pass over the whole sequence"
)
MAX_ERROR = 0.01
"""Largest change of logits by padding and cache that is accepted, in standard deviations."""
MAX_ROUNDED_ERROR = 0.25
"""The same for weights that are rounded."""


class ModulesEngine:
    """Slots over the model's own cache: keys and values, states, or both."""

    def __init__(self, policy: Policy, prompts: Sequence[np.ndarray], slots: int, _max_tokens: int) -> None:
        self.policy = policy
        self.prompts = prompts
        self.slots = slots
        # Rows of the model's batch that still run, in the order of slots; ``decode`` drops the others.
        self.rows: list[int] = []
        self.cache: Cache | None = None
        self.cache_name = _cache_name(policy)

    @property
    def memory(self) -> int:
        """Bytes of keys, values and states."""
        layers = self.cache.layers if self.cache is not None else ()
        values = list[object]()
        # Layers differ by kind: they hold tensors as attributes (keys, values), or dicts of them (states).
        for layer in layers:
            for value in vars(layer).values():
                values += value.values() if isinstance(value, dict) else [value]
        return alive_bytes(value for value in values if isinstance(value, Tensor))

    def free_slots(self, running: int) -> int:
        """Return all slots or none: a new batch starts when the last one is done."""
        return 0 if running else self.slots

    def admit(self, requests: Sequence[int]) -> Tensor:
        """Prefill one row per completion. Return the first logits (n, V)."""
        longest = max(len(self.prompts[r]) for r in requests)
        shape = (len(requests), longest)
        device = self.policy.device
        tokens = torch.zeros(shape, dtype=torch.int64)
        # (n, longest) attention mask: 0 on the padding at the left, 1 on tokens. It grows with each token.
        self.mask = torch.zeros(shape, dtype=torch.int64, device=device)
        for row, request in enumerate(requests):
            prompt = self.prompts[request]
            tokens[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            self.mask[row, longest - len(prompt) :] = 1
        self.cache = None
        self.rows = list(range(len(requests)))
        # Positions count from the first real token; padding is masked, but its position must not be negative.
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return self._forward(tokens.to(device), positions)

    def decode(self, tokens: Tensor) -> Tensor:
        """Append a token (B,) to every running slot. Return the next logits (B, V)."""
        if len(self.rows) < len(self.mask):
            rows = torch.tensor(self.rows, device=self.mask.device)
            assert self.cache is not None, "completions are admitted before they are decoded"
            # Not batch_select_indices: layers with states lack it, or lose their states by it.
            self.cache.reorder_cache(rows)
            self.mask = self.mask[rows]
            self.rows = list(range(len(rows)))
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(tokens), 1)), dim=1)
        # A row's position is its number of tokens so far, less one.
        return self._forward(tokens[:, None], self.mask.sum(-1, keepdim=True) - 1)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        mask = self.mask
        # Architectures with states alone mask only the tokens that they are given, not those before them.
        if self.cache is not None and not any(hasattr(layer, "keys") for layer in self.cache.layers):
            mask = mask[:, -tokens.shape[1] :]
        out = self.policy.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        self.cache = getattr(out, self.cache_name, None)
        if not isinstance(self.cache, Cache):
            raise _refusal(self.policy, NO_CACHE)
        return out.logits[:, -1]

    def evict(self, compaction: Compaction) -> None:
        """Free the slots of completions that have ended; the next ``decode`` drops their rows."""
        self.rows = compaction.apply(self.rows)


def check_sampling(policy: Policy) -> None:
    """Raise ConfigError unless each completion has the same logits in a ragged batch as it has alone."""
    try:
        errors = _trial(policy)
    except Exception as error:  # of whatever code an architecture has
        # A mistake in the config, or too little memory, is not the architecture's fault.
        if isinstance(error, CoveyError) or out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
        fault = f"its modules fail with a cache ({type(error).__name__}: {first_line})"
        raise _refusal(policy, fault) from error
    if any(p.dtype != torch.float32 for p in policy.model.parameters()):
        # The median, because rounding alone may choose other experts in some rows.
        differs = errors.median() > MAX_ROUNDED_ERROR
    else:
        differs = errors.max() > MAX_ERROR
    if differs:
        raise _refusal(
            policy,
            "in a batch of prompts of several lengths its logits differ from those of each prompt alone",
        )


@torch.no_grad()
def _trial(policy: Policy) -> Tensor:
    """Return the differences of logits in a batch from each text's own, in standard deviations: (7,)."""
    vocabulary = len(policy.model.get_input_embeddings().weight)
    # Three lengths, so that two rows are padded; the ids only have to differ.
    texts = [torch.arange(start, start + length) % vocabulary for start, length in ((5, 9), (40, 2), (70, 5))]
    engine = ModulesEngine(policy, [text.numpy() for text in texts], len(texts), 2)
    errors = list[Tensor]()
    logits = engine.admit(range(len(texts)))
    # Prefill (3 texts), then a step after the first was evicted (2), then one more (2): 7 comparisons.
    for ended in ([0], [], None):
        for batch_logits, text in zip(logits, texts, strict=True):
            own_logits = policy.model(input_ids=text[None].to(policy.device), use_cache=False).logits[0, -1]
            difference = (batch_logits - own_logits).float().square().mean().sqrt()
            errors.append(difference / own_logits.float().std())
        if ended is not None:
            compaction = Compaction.after(ended, len(texts))
            engine.evict(compaction)
            texts = [torch.cat((text, text[:1])) for text in compaction.apply(texts)]
            logits = engine.decode(torch.stack([text[-1] for text in texts]).to(policy.device))
    return torch.stack(errors)


def _cache_name(policy: Policy) -> str:
    parameters = inspect.signature(policy.model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise _refusal(policy, NO_CACHE)


def _refusal(policy: Policy, reason: str) -> ConfigError:
    kind = policy.model.config.model_type
    return ConfigError(
        f"model: covey cannot sample from {kind} in this process: {reason}. Use another model, or let vLLM "
        "or SGLang sample (rollout.sampler)"
    )
