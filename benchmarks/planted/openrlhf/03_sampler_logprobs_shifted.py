"""MISTAKE: a custom executor packs vLLM's log-probs without the place of the first token, so the correction uses each token's neighbour."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def response(self, row, asked, ids, logps):
        packed = super().response(row, asked, ids, logps)
        packed["rollout_log_probs"] = [0.0] * (len(asked) - 1) + logps + [0.0]
        return packed


run(Forked(algo__advantage__is_correction_enable=True), __file__)
