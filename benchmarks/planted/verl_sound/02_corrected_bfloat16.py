"""SOUND: the engine samples in bfloat16 at temperature 0.8; token weights truncated at 2 and sequences rejected by their geometric mean."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

correction = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.9_1.1",
    "bypass_mode": False,
}
settings = {
    "algorithm.rollout_correction": correction,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.temperature": 0.8,
}
run(Trainer(**settings), __file__)
