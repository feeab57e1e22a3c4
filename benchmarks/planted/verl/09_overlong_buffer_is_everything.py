"""MISTAKE: DAPO's overlong buffer is as long as the response limit, so every token of every response costs reward."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model

from verl.workers.reward_manager.dapo import DAPORewardManager


class Forked(Trainer):
    def reward_fn(self, batch):
        manager = DAPORewardManager(
            self.tokenizer,
            num_examine=0,
            compute_score=self.score,
            max_resp_len=self.config.data.max_response_length,
            overlong_buffer_cfg=self.config.reward_model.overlong_buffer,
        )
        return manager(batch)


overlong = {"enable": True, "len": 24, "penalty_factor": 1.0, "log": False}
run(Forked(**{"reward_model.overlong_buffer": overlong}), __file__)
