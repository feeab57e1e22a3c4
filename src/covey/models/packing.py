"""Packing: many sequences as one flat run of tokens, each prompt once for all its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.models.forward import Rows

SIMILAR = 0.75
"""Sequences attend in one block while the shortest has this share of the longest's length."""


@dataclass(frozen=True)
class Packed:
    """Flat tokens of some prompts and their completions, and where each prediction is made.

    A completion's last token is predicted but never read, so it is not among the tokens.
    T flat tokens, M predicted tokens, N completions.
    """

    tokens: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64: place in the sequence; a completion goes on where its prompt ends."""
    blocks: tuple[Rows, ...]
    """Who attends to whom."""
    sources: Tensor
    """(M,) int64: the flat token whose hidden state predicts."""
    targets: Tensor
    """(M,) int64: the token to be predicted."""
    place: Tensor
    """(N, L) bool: where the M predictions stand when completions are laid out as rows."""
    spans: Tensor
    """(N, 4) int64 per completion: flat start and length of its prompt, of its own tokens."""

    def unpack(self, values: Tensor) -> Tensor:
        """(M,) values of the predictions -> (N, L), zero on the padding."""
        return values.new_zeros(self.place.shape).masked_scatter(self.place, values)

    def sequences(self) -> tuple[Tensor, Tensor]:
        """Each completion with its own copy of its prompt, as flat positions, right-padded.

        -> index (N, S) int64 with 0 on padding, real (N, S) bool. For models that cannot share.
        """
        prefix, prefix_length, start, length = (column[:, None] for column in self.spans.T)
        column = torch.arange(int((prefix_length + length).max()), device=self.spans.device)
        own = start + column - prefix_length
        real = column < prefix_length + length
        return torch.where(column < prefix_length, prefix + column, own).where(real, 0), real

    def to(self, device: torch.device) -> Packed:
        """The same on a device."""
        if self.tokens.device == device:
            return self
        blocks = tuple(Rows(*(t.to(device) for t in vars(b).values())) for b in self.blocks)
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, blocks=blocks, **moved)


class _Span(NamedTuple):
    """A run of flat tokens and the prompt it continues (of length 0 for a prompt itself)."""

    prefix: int
    prefix_length: int
    start: int
    length: int


def pack(prompts: Sequence[np.ndarray], completions: Sequence[Sequence[np.ndarray]]) -> Packed:
    """Lay out prompts (P,) and the completions (L,) of each, in order. Prompts are never empty."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    heads: list[_Span] = []
    tails: list[_Span] = []
    flat = 0
    for prompt, answers in zip(prompts, completions, strict=True):
        head = _Span(0, 0, flat, len(prompt))
        heads.append(head)
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        flat += len(prompt)
        for answer in answers:
            read = answer[:-1]
            tokens.append(read)
            positions.append(np.arange(len(prompt), len(prompt) + len(read)))
            own = np.arange(flat, flat + len(read))
            sources.append(np.concatenate(([head.start + head.length - 1], own)))
            tails.append(_Span(head.start, head.length, flat, len(read)))
            flat += len(read)
    answers = [a for group in completions for a in group]
    lengths = np.array([len(a) for a in answers], dtype=np.int64)
    return Packed(
        tokens=_tensor(tokens),
        positions=_tensor(positions),
        blocks=(*_blocks(heads), *_blocks([s for s in tails if s.length])),
        sources=_tensor(sources),
        targets=_tensor(answers),
        place=torch.from_numpy(np.arange(lengths.max(initial=0)) < lengths[:, None]),
        spans=torch.tensor(tails, dtype=torch.int64).reshape(-1, 4),
    )


def _tensor(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))


def _blocks(spans: Sequence[_Span]) -> list[Rows]:
    blocks: list[list[_Span]] = []
    for span in sorted(spans, key=lambda s: -s.length):
        if blocks and span.length >= SIMILAR * blocks[-1][0].length:
            blocks[-1].append(span)
        else:
            blocks.append([span])
    return [_rows(block) for block in blocks]


def _rows(spans: Sequence[_Span]) -> Rows:
    """Index tensors of sequences that attend together: keys are [prompt | own tokens]."""
    prefix, prefix_length, start, length = (np.array(x)[:, None] for x in zip(*spans, strict=True))
    own = np.arange(length.max())[None]
    shared = np.arange(prefix_length.max())[None]
    real = own < length
    queries = np.where(real, start + own, 0)
    seen = shared < prefix_length
    keys = np.concatenate((np.where(seen, prefix + shared, 0), queries), axis=1)
    causal = (own[0][:, None] >= own) & real[:, None]
    before = np.broadcast_to(seen[:, None], (len(spans), own.size, shared.size))
    mask = np.concatenate((before, causal), axis=2) | ~real[:, :, None]
    return Rows(*map(torch.from_numpy, (queries, keys, mask[:, None], real)))
