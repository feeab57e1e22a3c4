"""A truncated completion gets the end token as its last token, which nobody sampled (OpenRLHF/OpenRLHF#238).

Right answer: trained tokens were not sampled: an end token replaces the last token of truncated completions.
"""

from trl import GRPOTrainer
from world import grpo, train


class Forced(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        end = self._tokenizer.eos_token_id
        return [row if row[-1] == end else [*row[:-1], end] for row in ids], logprobs


train(grpo(Forced, max_completion_length=8))
