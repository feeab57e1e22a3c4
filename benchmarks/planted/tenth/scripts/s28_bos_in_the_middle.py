"""Each part is tokenized with its own BOS, which lands between prompt and answer (axolotl-ai-cloud/axolotl#1616).

Right answer: a BOS token in the middle of the sequence, before chosen and rejected.
"""

from trl.trainer.dpo_trainer import DataCollatorForPreference
from world import base_tokenizer, dpo, train


class Started(DataCollatorForPreference):
    bos = base_tokenizer().bos_token_id

    def torch_call(self, examples):
        keys = ("prompt_ids", "chosen_ids", "rejected_ids")
        return super().torch_call([{**e, **{k: [self.bos, *e[k]] for k in keys}} for e in examples])


train(dpo(collator=Started(pad_token_id=base_tokenizer().pad_token_id)))
