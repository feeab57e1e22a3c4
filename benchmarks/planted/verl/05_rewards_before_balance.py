"""MISTAKE: rewards are computed asynchronously from the batch as it was before it is balanced, and are written into the reordered batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def balance(self, batch):
        """Interleave long and short rows, as for several workers; the rewards' future knows the old order."""
        lengths = batch.batch["attention_mask"].sum(dim=-1)
        by_length = lengths.argsort(stable=True)
        half = len(by_length) // 2
        order = torch.stack([by_length[:half], by_length[half:].flip(0)], dim=1).reshape(-1)
        future = batch.batch["token_level_scores"].sum(dim=-1)
        batch.reorder(order)
        scores = torch.zeros_like(batch.batch["token_level_scores"])
        last = batch.batch["response_mask"].sum(dim=-1) - 1
        scores[torch.arange(len(last)), last] = future
        batch.batch["token_level_scores"] = scores
        return batch


run(Forked(), __file__)
