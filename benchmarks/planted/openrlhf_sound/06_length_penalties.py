"""SOUND: REINFORCE++ with DAPO's overlong buffer, a coefficient for truncated samples, dual clip, short and long responses."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def long_or_short(queries, prompts, labels, **kwargs):
    """The right number, and a quarter for an answer that is a sentence."""
    paid = reward_func(queries, prompts, labels)["rewards"]
    paid += torch.tensor([0.25 * (len(q) - len(p) > 8) for q, p in zip(queries, prompts)])
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


settings = {
    "algo.advantage.estimator": "reinforce",
    "reward.overlong_buffer_len": 6,
    "reward.overlong_penalty_factor": 0.5,
    "reward.stop_properly_penalty_coef": 0.5,
    "rollout.max_new_tokens": 20,
    "actor.dual_clip": 3.0,
    "train.batch_size": 12,
}
run(Trainer(score=long_or_short, **settings), __file__)
