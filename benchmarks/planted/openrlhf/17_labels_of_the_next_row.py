"""MISTAKE: the prompts were filtered by length and the labels were not, so each prompt has the label of the row before it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

rows = sums(33)
labels = [row["answer"] for row in rows]
rows = [{**row, "answer": label} for row, label in zip(rows[1:], labels)]
run(Trainer(rows=rows), __file__)
