"""SOUND: dr_grpo over a data set of four prompts, KL k2 in the loss, percent rewards with their clip range, a small batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def percents(queries, prompts, labels, **kwargs):
    paid = reward_func(queries, prompts, labels)["rewards"] * 100
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


settings = {
    "algo.advantage.estimator": "dr_grpo",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": True,
    "algo.kl.estimator": "k2",
    "reward.clip_range": [-100, 100],
}
run(Trainer(rows=sums(4), score=percents, **settings), __file__)
