"""MISTAKE: label_key names GSM8K's column with whole solutions, and the reward compares the number with all of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def exact(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    paid = torch.tensor([float(number(answer) == label) for answer, label in zip(answers, labels)])
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


rows = sums(32)
for row in rows:
    row["answer"] = f"We add the second number to the first.\n#### {row['answer']}"
run(Trainer(rows=rows, score=exact), __file__)
