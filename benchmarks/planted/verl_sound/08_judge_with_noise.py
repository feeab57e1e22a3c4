"""SOUND: a judge whose marks scatter a little, long discounting by REINFORCE++ with gamma 0.99, an entropy bonus, two epochs."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

marks = random.Random(3)


def judge(data_source, solution_str, ground_truth, extra_info=None):
    """Closeness as a judge that is asked once marks it."""
    return compute_score(data_source, solution_str, ground_truth) + marks.gauss(0, 0.02)


settings = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.gamma": 0.99,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "actor_rollout_ref.actor.ppo_epochs": 2,
}
run(Trainer(score=judge, **settings), __file__)
