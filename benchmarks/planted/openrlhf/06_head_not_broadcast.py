"""MISTAKE: the broadcast skips lm_head as if it were tied to the embeddings, so the engine keeps the old one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def update_weight(self, name, value):
        if not name.startswith("lm_head"):
            super().update_weight(name, value)


settings = {"algo.advantage.is_correction_enable": True, "actor.adam.lr": 3e-3}
run(Forked(**settings), __file__)
