"""Packing for a model's forward pass: one flat row of tokens, each prompt once for all its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.models.ops import Sequences
from covey.types import SamplingMask


@dataclass(frozen=True)
class Packed:
    """Flat tokens of some prompts and their completions, and the place of each prediction.

    A completion's last token is predicted but never read, so it is not among the tokens.
    T flat tokens, M predicted tokens, N completions of up to L tokens, S = prompts + N sequences.

    Example: a prompt of two tokens with completions of three and one.

    >>> packed = pack([np.array([5, 6])], [[np.array([7, 8, 9]), np.array([4])]])
    >>> packed.tokens.tolist(), packed.positions.tolist()
    ([5, 6, 7, 8], [0, 1, 2, 3])
    >>> packed.sources.tolist(), packed.targets.tolist()  # 5 6 predict 7 and 4, 7 predicts 8, 8 predicts 9
    ([1, 2, 3, 1], [7, 8, 9, 4])
    >>> packed.place.int().tolist()
    [[1, 1, 1], [1, 0, 0]]
    """

    tokens: Tensor
    """(T,) int64: token ids."""
    positions: Tensor
    """(T,) int64: position in the sequence; a completion continues its prompt."""
    sequences: Sequences
    """The spans that attend to each other; each prompt's span precedes its completions' spans."""
    sources: Tensor
    """(M,) int64: the flat token whose hidden state predicts."""
    targets: Tensor
    """(M,) int64: the token to be predicted."""
    place: Tensor
    """(N, L) bool: true at the M predictions when completions are laid out as rows."""
    sampling_mask: SamplingMask | None = None
    """Ids that could be drawn at each of the M predictions; None: all could."""

    def unpack(self, values: Tensor) -> Tensor:
        """Lay out values of the predictions as rows, zero on the padding. (M,) -> (N, L)."""
        return values.new_zeros(self.place.shape).masked_scatter(self.place, values)

    @property
    def completions(self) -> Tensor:
        """(N, 4) int64: the spans of the completions alone."""
        # Prompts are never empty, so a span with a prompt is a completion.
        spans = self.sequences.spans
        return spans[spans[:, 1] > 0]

    def pad_completions(self) -> tuple[Tensor, Tensor]:
        """Return each completion after its own copy of its prompt, as flat positions, right-padded.

        These are index (N, W) int64 with 0 on padding, and real (N, W) bool. For models that cannot share
        prompts.
        """
        prefix, prefix_length, start, length = (column[:, None] for column in self.completions.T)
        column = torch.arange(int((prefix_length + length).max()), device=start.device)
        # (N, W): columns of the prompt come first, then those of the completion, then padding.
        in_prompt = prefix + column
        in_completion = start + column - prefix_length
        index = torch.where(column < prefix_length, in_prompt, in_completion)
        real = column < prefix_length + length
        return index.where(real, 0), real

    def to(self, device: torch.device) -> Packed:
        """The same packing with its tensors on ``device``."""
        if self.tokens.device == device:
            return self
        spans, groups, longest = self.sequences
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        sequences = Sequences(spans.to(device), groups.to(device), longest)
        return Packed(**{**vars(self), **moved, "sequences": sequences})


def pack(
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[np.ndarray]],
    sampling_mask: SamplingMask | None = None,
) -> Packed:
    """Lay out prompts (P,) and the completions (L,) of each, in order. Prompts are never empty.

    ``sampling_mask`` has a place for each token of the completions, in the same order.
    """
    sequences = _sequences(prompts, completions)
    spans = sequences.spans.tolist()
    parts = [
        [prompt, *(a[:-1] for a in answers)] for prompt, answers in zip(prompts, completions, strict=True)
    ]
    targets = [answer for answers in completions for answer in answers]
    lengths = torch.tensor([len(target) for target in targets], dtype=torch.int64)
    # Prompts are never empty, so a span with a prompt is a completion.
    sources = [_predictors(*span) for span in spans if span[1]]
    return Packed(
        tokens=_flat([tokens for group in parts for tokens in group]),
        # A completion continues its prompt.
        positions=_flat([np.arange(prompt, prompt + length) for _, prompt, _, length in spans]),
        sequences=sequences,
        sources=_flat([flat[:length] for flat, length in zip(sources, lengths, strict=True)]),
        targets=_flat(targets),
        place=torch.arange(max(lengths, default=0)) < lengths[:, None],
        sampling_mask=sampling_mask,
    )


def _sequences(prompts: Sequence[np.ndarray], completions: Sequence[Sequence[np.ndarray]]) -> Sequences:
    spans = []
    groups = [0]
    flat = 0  # tokens laid out so far, which is the index of the next one
    for prompt, answers in zip(prompts, completions, strict=True):
        prefix = (flat, len(prompt))
        spans.append((0, 0, *prefix))
        flat += len(prompt)
        for answer in answers:
            length = max(len(answer) - 1, 0)  # the last token is predicted but never read
            spans.append((*prefix, flat, length))
            flat += length
        groups.append(len(spans))
    longest = max((prefix + length for _, prefix, _, length in spans), default=0)
    return Sequences(torch.tensor(spans).reshape(-1, 4), torch.tensor(groups), longest)


def _predictors(prompt: int, prompt_length: int, start: int, length: int) -> np.ndarray:
    """The flat tokens that predict a completion's: the prompt's last one, then each before the next."""
    return np.append(prompt + prompt_length - 1, np.arange(start, start + length))


def _flat(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))
