"""MISTAKE: rewards are percents from 0 to 100 and reward.clip_range stays at 10, which cuts the centred rewards of nearly all samples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def percents(queries, prompts, labels, **kwargs):
    paid = reward_func(queries, prompts, labels)["rewards"] * 100
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


run(Trainer(score=percents, algo__advantage__estimator="rloo"), __file__)
