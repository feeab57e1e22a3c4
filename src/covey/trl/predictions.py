"""Predictions and labels of evaluated rows in the form in which TRL passes them to `compute_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from covey.trl.rows import UNTRAINED, Row, Tokens

Labels = Callable[[Row], Sequence[Sequence[int]]]
"""Row -> the labels of each of its sequences."""


def batch_by_batch(rows: Sequence[Row], sequences: Labels, size: int) -> list[Sequence[int]]:
    """Return the sequences of rows in TRL's order: of each evaluated batch all first ones, then all second
    ones. Of pairs, these are the chosen and the rejected answers.

    >>> batch_by_batch([{"n": 1}, {"n": 2}, {"n": 3}], lambda row: ([row["n"]], [-row["n"]]), 2)
    [[1], [2], [-1], [-2], [3], [-3]]
    """
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    by_place = (zip(*(sequences(row) for row in batch), strict=True) for batch in batches)
    return [sequence for positions in by_place for position in positions for sequence in position]


def read_by(tokens_of: Tokens) -> Labels:
    """Return the function that gives a row's sequences as the model reads them: prompt and answer."""

    def sequences(row: Row) -> list[list[int]]:
        prompt, answers = tokens_of(row)
        return [[*prompt, *answer.ids] for answer in answers.values()]

    return sequences


@torch.no_grad()
def predictions(model: Any, read: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> EvalPrediction:
    """Return a model's logits of the sequences that it reads, and their labels (N, T).

    Logits are (N, T, V) of a language model and (N, 1) of a reward model, which has no labels. Sequences are
    padded at the end, labels with -100.
    """
    inputs = (torch.tensor([ids], device=model.device) for ids in read)
    logits = pad_sequence([model(input_ids=ids).logits[0].float().cpu() for ids in inputs], batch_first=True)
    padded = pad_sequence([torch.tensor(ids) for ids in labels], True, UNTRAINED).numpy() if labels else ()
    return EvalPrediction(predictions=logits.numpy(), label_ids=padded)
