"""SOUND: bypass mode, with the engine's log-probs as the old ones, a REINFORCE loss with truncated weights, and OPO's baseline."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

correction = {
    "bypass_mode": True,
    "loss_type": "reinforce",
    "rollout_is": "sequence",
    "rollout_is_threshold": 3.0,
    "rollout_rs": None,
}
settings = {
    "algorithm.adv_estimator": "opo",
    "algorithm.rollout_correction": correction,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
}
run(Trainer(**settings), __file__)
