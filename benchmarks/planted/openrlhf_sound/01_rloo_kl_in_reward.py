"""SOUND: RLOO with the k2 estimate of the KL in the reward of each token, and uneven micro-batches."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

settings = {
    "algo.advantage.estimator": "rloo",
    "algo.kl.init_coef": 0.05,
    "algo.kl.estimator": "k2",
    "rollout.micro_batch_size": 5,
    "train.micro_batch_size": 6,
}
run(Trainer(**settings), __file__)
