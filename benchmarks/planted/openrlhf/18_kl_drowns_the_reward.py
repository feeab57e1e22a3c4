"""MISTAKE: kl.init_coef is 2 with the KL in the reward, so after the first step the KL decides the sign of nearly all advantages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

run(
    Trainer(
        algo__kl__init_coef=2.0,
        algo__advantage__estimator="reinforce",
        rollout__n_samples_per_prompt=6,
        actor__adam__lr=3e-3,
    ),
    __file__,
)
