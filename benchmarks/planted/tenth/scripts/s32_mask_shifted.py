"""The loss mask is shifted once too often: the end token is out, the prompt's last token in (verl-project/verl#3562).

Right answer: the loss mask is off by one: end token not trained, last prompt token trained.
"""

from trl import SFTTrainer
from world import sft, train


class Shifted(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        trained = (labels != -100).roll(-1, 1)
        trained[:, -1] = False
        inputs["labels"] = inputs["input_ids"].masked_fill(~trained, -100)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


train(sft(cls=Shifted))
