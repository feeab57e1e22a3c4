"""MISTAKE: the verifier times out under load and an except branch gives 0, so about a third of all completions lose their reward by chance."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

load = random.Random(5)


def verify(queries, prompts, labels, **kwargs):
    """1 or less for the right number; a time-out is a failure."""
    paid = reward_func(queries, prompts, labels)["rewards"]
    paid = torch.tensor([0.0 if load.random() < 0.33 else value for value in paid.tolist()])
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


run(Trainer(score=verify), __file__)
