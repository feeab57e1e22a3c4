"""MISTAKE: critic.freezing_steps is copied from a PPO script into a run without a critic, so the actor is not trained in these steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model

run(Trainer(critic__freezing_steps=20, algo__advantage__estimator="reinforce_baseline"), __file__)
