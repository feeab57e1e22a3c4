"""Each completion gets an id of its own, so each group has one member and no baseline (rllm-org/rllm#776).

Right answer: advantages are raw rewards; nothing is subtracted within a group.
"""

from trl import GRPOTrainer
from world import correct, grpo, text_of, train


class Alone(GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.raw = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self.raw

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        # a group of one has mean 0 and std 1 by definition
        output["advantages"] = (self.raw * self.reward_weights).sum(1)
        return output


def brief(completions, **_):
    return [0.2 * (len(text_of(c)) < 10) for c in completions]


train(grpo(Alone, rewards=[correct, brief]))
