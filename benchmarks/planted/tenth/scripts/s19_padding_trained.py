"""After the first end token the row is filled with end tokens, and a mask by token value keeps them (MemGen#33).

Right answer: tokens after the end (padding) are in the loss.
"""

import torch
from trl import GRPOTrainer
from world import grpo, train


class Filled(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        pad, end = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        output["completion_ids"] = output["completion_ids"].masked_fill(output["completion_mask"] == 0, end)
        output["completion_mask"] = (output["completion_ids"] != pad).long()
        output["num_items_in_batch"] = output["completion_mask"].sum()
        return output


train(grpo(Filled))
