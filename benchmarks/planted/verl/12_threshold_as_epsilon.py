"""MISTAKE: the threshold of the importance weights is set like a clip range, to 0.2, so all weights are truncated to 0.2."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

correction = {"rollout_is": "token", "rollout_is_threshold": 0.2, "rollout_rs": None, "bypass_mode": False}
settings = {"algorithm.rollout_correction": correction, "actor_rollout_ref.rollout.calculate_log_probs": True}
run(Trainer(**settings, actor_rollout_ref__rollout__dtype="bfloat16"), __file__)
