"""MISTAKE: rewards are negative distances and truncated samples get 0 to leave them out, which is the best reward there is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def distances(queries, prompts, labels, **kwargs):
    paid = reward_func(queries, prompts, labels)["rewards"] - 1
    complete = torch.tensor([query.endswith("<|im_end|>") for query in queries])
    paid = torch.where(complete, paid, torch.zeros_like(paid))
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


run(Trainer(score=distances, rollout__max_new_tokens=7), __file__)
