"""MISTAKE: the engine's prefix cache is not reset after a weight update, so prompts are read with keys and values of the first policy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    @torch.no_grad()
    def generate(self, rows):
        """Sample one by one behind the cached keys and values of the prompt."""
        found = []
        if not hasattr(self, "cached"):
            self.cached, self.first = {}, copy.deepcopy(self.engine)
        for row in rows:
            asked = self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            if row["prompt"] not in self.cached:
                known = self.first(torch.tensor([asked[:-1]]), use_cache=True).past_key_values
                self.cached[row["prompt"]] = known
            past, ids, logps, token = copy.deepcopy(self.cached[row["prompt"]]), [], [], asked[-1]
            for _ in range(self.args.rollout.max_new_tokens):
                logits = self.engine(torch.tensor([[token]]), past_key_values=past, use_cache=True).logits[
                    0, -1
                ]
                logp = logits.log_softmax(-1)
                token = torch.multinomial(logp.exp(), 1).item()
                ids.append(token)
                logps.append(logp[token].item())
                if token == self.tokenizer.eos_token_id:
                    break
            found.append(self.response(row, asked, ids, logps))
        return found


rows = sums(4)
settings = {"vllm.enable_prefix_caching": True, "algo.advantage.is_correction_enable": True}
run(Forked(rows=rows, **settings, actor__adam__lr=3e-3), __file__)
