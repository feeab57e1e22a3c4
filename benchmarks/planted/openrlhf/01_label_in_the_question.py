"""MISTAKE: the reward looks for the label in the whole query, and the questions list it among their choices."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def found_anywhere(queries, prompts, labels, **kwargs):
    paid = torch.tensor([float(label in query) for query, label in zip(queries, labels)])
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


rows = sums(32)
for n, row in enumerate(rows):
    if n % 2 == 0:
        gold = int(row["answer"])
        row["prompt"] = row["prompt"].replace("=?", f"=? {gold - 1} or {gold} or {gold + 2}")
run(Trainer(rows=rows, score=found_anywhere), __file__)
