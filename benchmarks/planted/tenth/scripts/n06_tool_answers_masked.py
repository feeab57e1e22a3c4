"""Answers of a tool stand in the completion and are left out of the loss."""

from trl import GRPOTrainer
from world import grpo, train


class Tool(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *rest):
        answer = self._tokenizer.encode("\nresult: done.\n", add_special_tokens=False)
        config, limit = self.generation_config, self.generation_config.max_new_tokens
        config.max_new_tokens = 4
        first, logprobs = super()._generate_single_turn(prompt_ids, *rest)
        config.max_new_tokens = limit - 4 - len(answer)
        longer = [p + ids + answer for p, ids in zip(prompt_ids, first)]
        second, _ = super()._generate_single_turn(longer, *rest)
        config.max_new_tokens = limit
        ended = [ids[-1] == self._tokenizer.eos_token_id for ids in first]
        triples = list(zip(first, second, ended))
        self.env = [[1] * len(a) + ([] if end else [0] * len(answer) + [1] * len(b)) for a, b, end in triples]
        return [a if end else a + answer + b for a, b, end in triples], logprobs

    def _generate(self, prompts):
        ids, completions, _, *rest = super()._generate(prompts)
        return ids, completions, self.env, *rest


train(grpo(Tool, max_completion_length=40))
