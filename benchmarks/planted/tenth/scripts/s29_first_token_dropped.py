"""The log-prob of the first response token is cut away, where the two answers part (fw-ai/cookbook#388).

Right answer: the first token of the completions is not in the loss.
"""

from trl.trainer.dpo_trainer import DataCollatorForPreference
from world import base_tokenizer, dpo, train


class Late(DataCollatorForPreference):
    def torch_call(self, examples):
        output = super().torch_call(examples)
        mask = output["completion_mask"]
        first = (mask.cumsum(1) == 1) & (mask == 1)
        output["completion_mask"] = mask * ~first
        return output


train(dpo(collator=Late(pad_token_id=base_tokenizer().pad_token_id)))
