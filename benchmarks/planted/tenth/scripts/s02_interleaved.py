"""Completions arrive as P1 P2 P3 P4 P1 P2 ..., advantages are taken over neighbours (StarsfieldAI/R1-V#67).

Right answer: the groups of the advantages mix different prompts.
"""

from trl import GRPOTrainer
from world import grpo, train


class Interleaved(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        prompts = len(inputs) // self.num_generations
        order = [p * self.num_generations + g for g in range(self.num_generations) for p in range(prompts)]
        return super()._generate_and_score_completions([inputs[i] for i in order])


train(grpo(Interleaved))
