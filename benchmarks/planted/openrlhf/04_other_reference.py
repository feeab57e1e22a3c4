"""MISTAKE: ref.model_name_or_path is another checkpoint than the one that training starts from, and a KL loss pulls to it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def load_reference(self):
        torch.manual_seed(1)
        other = model()
        for parameter in other.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return other


settings = {"algo.kl.init_coef": 0.05, "algo.kl.use_loss": True, "algo.kl.estimator": "k3"}
run(Forked(**settings, ref__model_name_or_path="sft-epoch-1"), __file__)
