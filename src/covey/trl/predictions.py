"""Predictions and labels of evaluated rows, as TRL passes them to `compute_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from covey.trl.rows import UNTRAINED, Row, TokenReader

Sequences = Callable[[Row], Sequence[Sequence[int]]]
"""Row -> the ids or labels of each of its sequences."""


def in_trl_order(rows: Sequence[Row], sequences: Sequences, size: int) -> list[Sequence[int]]:
    """Return the sequences of rows in TRL's order: in each batch of pairs all chosen answers, then all
    rejected ones.

    >>> in_trl_order([{"n": 1}, {"n": 2}, {"n": 3}], lambda row: ([row["n"]], [-row["n"]]), 2)
    [[1], [2], [-1], [-2], [3], [-3]]
    """
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    ordered: list[Sequence[int]] = []
    for batch in batches:
        # zip(*...) transposes the batch: (rows, sequences of a row) to (sequences of a row, rows).
        for sequences_of_place in zip(*map(sequences, batch), strict=True):
            ordered += sequences_of_place
    return ordered


def sequence_reader(tokens_of: TokenReader) -> Sequences:
    """Return a function from a row to its sequences, each a prompt with an answer."""

    def sequences(row: Row) -> list[list[int]]:
        prompt, answers = tokens_of(row)
        return [[*prompt, *answer.ids] for answer in answers.values()]

    return sequences


@torch.no_grad()
def predict(model: Any, inputs: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> EvalPrediction:
    """Return a model's logits for its inputs, and the labels (N, T).

    Logits are (N, T, V) of a language model and (N, 1) of a reward model, which has no labels. Sequences are
    padded at the end, labels with -100.
    """
    tensors = (torch.tensor([ids], device=model.device) for ids in inputs)
    logits = pad_sequence([model(input_ids=ids).logits[0].float().cpu() for ids in tensors], batch_first=True)
    padded = pad_sequence([torch.tensor(ids) for ids in labels], True, UNTRAINED).numpy() if labels else ()
    return EvalPrediction(predictions=logits.numpy(), label_ids=padded)
