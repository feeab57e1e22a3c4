"""A text classifier for few labelled lines: logistic regression on hashed words and pairs of words.

DeepSeekMath selected mathematics from a crawl with such a classifier, arXiv 2402.03300. All numbers are one
word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np

SLOTS = 1 << 16
"""Number of hash buckets."""
GRAM = re.compile(r"\d+|[^\W\d_]+|[^\w\s]")
DESCENT_STEPS = 300
"""Steps of gradient descent."""
LEARNING_RATE = 2.0
WEIGHT_DECAY = 1e-3


class TextClassifier:
    """A classifier that estimates the probability that a text is wanted."""

    def __init__(self, texts: Sequence[str], labels: Sequence[float]) -> None:
        """Learn from texts, each labelled 1 (wanted) or 0; both classes have the same total weight."""
        rows = [features(text) for text in texts]
        # Only the slots that occur, so that x (texts, used slots) stays small; the others keep weight 0.
        # Rows have norm 1.
        used = np.unique(np.concatenate(rows))
        x = np.stack([np.isin(used, row) / np.sqrt(max(len(row), 1)) for row in rows])
        y = np.array(labels)
        positive = y > 0.5
        example_weights = np.where(positive, 0.5 / max(positive.sum(), 1), 0.5 / max((~positive).sum(), 1))
        weights = np.zeros(len(used))
        bias = 0.0
        for _ in range(DESCENT_STEPS):
            # Gradient of the weighted log-loss by the logit of each text.
            error = example_weights * (_sigmoid(x @ weights + bias) - y)
            weights -= LEARNING_RATE * (x.T @ error + WEIGHT_DECAY * weights)
            bias -= LEARNING_RATE * float(error.sum())
        self.weights = np.zeros(SLOTS)
        self.bias = bias
        self.weights[used] = weights

    def probability(self, text: str) -> float:
        """Return the probability that a text is wanted."""
        row = features(text)
        return float(_sigmoid(np.array(self.weights[row].sum() / np.sqrt(max(len(row), 1)) + self.bias)))


def features(text: str) -> np.ndarray:
    """Return the slots of the words and the pairs of words in a text, each once."""
    words = ["#" if w[0].isdigit() else w for w in GRAM.findall(text.lower())]
    grams = {*words, *(f"{a} {b}" for a, b in pairwise(words))}
    return np.array(sorted({crc32(gram.encode()) % SLOTS for gram in grams}), dtype=np.int64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
