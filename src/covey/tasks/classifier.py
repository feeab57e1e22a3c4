"""A text classifier learned from a few labelled lines: hashed words and pairs of words, logistic regression.

As DeepSeekMath picked mathematics out of a crawl, arXiv 2402.03300. Numbers of any value are one word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np

SLOTS = 1 << 16
"""Places of the hash."""
GRAM = re.compile(r"\d+|[^\W\d_]+|[^\w\s]")
STEPS, RATE, DECAY = 300, 2.0, 1e-3


class TextClassifier:
    """The probability that a text is of the wanted kind."""

    def __init__(self, texts: Sequence[str], labels: Sequence[float]) -> None:
        """Learn from texts, each labelled 1 (wanted) or 0; both kinds count the same."""
        rows = [features(text) for text in texts]
        used = np.unique(np.concatenate(rows))
        x = np.stack([np.isin(used, row) / np.sqrt(max(len(row), 1)) for row in rows])
        y = np.array(labels)
        share = np.where(y > 0.5, 0.5 / max((y > 0.5).sum(), 1), 0.5 / max((y <= 0.5).sum(), 1))
        weights, bias = np.zeros(len(used)), 0.0
        for _ in range(STEPS):
            error = share * (_sigmoid(x @ weights + bias) - y)
            weights -= RATE * (x.T @ error + DECAY * weights)
            bias -= RATE * float(error.sum())
        self.weights, self.bias = np.zeros(SLOTS), bias
        self.weights[used] = weights

    def probability(self, text: str) -> float:
        """That a text is wanted."""
        row = features(text)
        return float(_sigmoid(np.array(self.weights[row].sum() / np.sqrt(max(len(row), 1)) + self.bias)))


def features(text: str) -> np.ndarray:
    """Slots of the words and the pairs of words in a text, each once."""
    words = ["#" if w[0].isdigit() else w for w in GRAM.findall(text.lower())]
    grams = {*words, *(f"{a} {b}" for a, b in pairwise(words))}
    return np.array(sorted({crc32(gram.encode()) % SLOTS for gram in grams}), dtype=np.int64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
