"""MISTAKE: a fork adds the entropy to the loss, so its coefficient drives the entropy down."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def entropy_term(self, entropy):
        return self.args.actor.entropy_coef * entropy


run(Forked(actor__entropy_coef=0.1, actor__adam__lr=3e-3), __file__)
