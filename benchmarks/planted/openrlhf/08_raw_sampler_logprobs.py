"""MISTAKE: vLLM returns its log-probs before the temperature of 0.6, and the correction takes them for those of the sampling distribution."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    @torch.no_grad()
    def response(self, row, asked, ids, logps):
        logits = self.engine(torch.tensor([asked + ids])).logits[0, len(asked) - 1 : -1]
        raw = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return super().response(row, asked, ids, raw)


settings = {"rollout.temperature": 0.6, "algo.advantage.is_correction_enable": True}
run(Forked(**settings), __file__)
