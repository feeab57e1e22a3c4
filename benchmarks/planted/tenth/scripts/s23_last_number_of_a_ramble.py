"""No stop is set, the model rambles on with examples, and the reward reads the last number (jsboige/CoursIA#13614).

Right answer: correct answers are paid 0: completions continue after the answer, the reward reads their end.
"""

from trl import GRPOTrainer
from world import grpo, train


class Rambling(GRPOTrainer):
    def _generate(self, prompts):
        self.generation_config.eos_token_id = None
        return super()._generate(prompts)


trainer = grpo(Rambling, max_completion_length=32)
trainer.eos_token_ids = []
train(trainer)
