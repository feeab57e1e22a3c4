"""The prompt is masked for the chosen half of the batch only (OpenRLHF/OpenRLHF#294).

Right answer: the prompt of rejected completions is in the loss.
"""

import torch
from trl.trainer.dpo_trainer import DataCollatorForPreference
from world import base_tokenizer, dpo, train


class HalfMasked(DataCollatorForPreference):
    def torch_call(self, examples):
        output = super().torch_call(examples)
        half = len(examples)
        output["completion_mask"][half:] = output["attention_mask"][half:]
        return output


train(dpo(collator=HalfMasked(pad_token_id=base_tokenizer().pad_token_id)))
