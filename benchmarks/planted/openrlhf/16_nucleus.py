"""MISTAKE: samples are drawn from the most likely half of the probability (top_p 0.5), and the trainer takes them as draws from all of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    @torch.no_grad()
    def generate(self, rows):
        found = []
        for row in rows:
            asked = self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            ids, logps = [], []
            while len(ids) < self.args.rollout.max_new_tokens and self.tokenizer.eos_token_id not in ids:
                logp = self.engine(torch.tensor([asked + ids])).logits[0, -1].log_softmax(-1)
                order = logp.argsort(descending=True)
                before = logp[order].exp().cumsum(0) - logp[order].exp()
                kept = order[before < self.args.rollout.top_p]
                ids.append(kept[torch.multinomial(logp[kept].exp(), 1)].item())
                logps.append(logp[ids[-1]].item())
            found.append(self.response(row, asked, ids, logps))
        return found


run(Forked(rollout__top_p=0.5, algo__advantage__is_correction_enable=True), __file__)
