"""A loss of one's own compares the logits with the same token instead of the next (GanjinZero/RRHF#48).

Right answer: labels are not shifted: each position is trained to repeat its own token.
"""

import torch
from trl import SFTTrainer
from world import sft, train


class SamePlace(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100)
        return (loss, None) if return_outputs else loss


train(sft(cls=SamePlace))
