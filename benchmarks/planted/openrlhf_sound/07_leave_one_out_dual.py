"""SOUND: RLOO with rewards of -1 and 1, an entropy bonus, dual clip, two epochs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def signs(queries, prompts, labels, **kwargs):
    paid = (reward_func(queries, prompts, labels)["rewards"] > 0.7).float() * 2 - 1
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


settings = {
    "algo.advantage.estimator": "rloo",
    "actor.dual_clip": 3.0,
    "actor.entropy_coef": 0.001,
    "train.max_epochs": 2,
}
run(Trainer(score=signs, **settings), __file__)
