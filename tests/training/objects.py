"""Models, rows and rewards given to a run as Python objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from covey.models.tiny import build_model, build_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "prompts_per_step": 2, "max_tokens": 4},
    "train": {"steps": 2, "lr": 1e-3, "save_every": 1},
    "eval": {"problems": 2, "samples": 1},
    "threads": 1,
    "quiet": True,
}


class Dataset:
    """As `datasets.Dataset`: rows by iteration, no Sequence."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.rows)


def varied(completion: str) -> float:
    return float(sum(map(ord, completion)))


def live(seed: int = 0) -> dict[str, Any]:
    tokenizer = build_tokenizer(row["prompt"] for row in ROWS)
    return {"model": build_model(tokenizer, seed, hidden=32, layers=1), "tokenizer": tokenizer}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}
