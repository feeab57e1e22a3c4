"""SOUND: group_norm, a k3 KL loss, two epochs over the shuffled buffer with two optimizer steps each, clip-higher."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

settings = {
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": True,
    "algo.kl.estimator": "k3",
    "train.max_epochs": 2,
    "train.batch_size": 12,
    "train.micro_batch_size": 4,
    "actor.eps_clip_low_high": [0.2, 0.28],
}
run(Trainer(**settings), __file__)
