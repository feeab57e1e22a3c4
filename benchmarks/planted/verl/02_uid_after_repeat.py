"""MISTAKE: uids are given after the prompts have been repeated, so each response is a group of its own and its advantage its raw reward."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def pack(self, rows, uids, *rest):
        fresh = [f"{self.global_steps}-{i}" for i in range(len(rows))]
        return super().pack(rows, fresh, *rest)


run(Forked(), __file__)
