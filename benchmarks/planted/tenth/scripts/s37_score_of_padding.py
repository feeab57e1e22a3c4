"""The reward model knows no pad token and reads its score at the last position, padding (huggingface/trl#937).

Right answer: scores are read at padding, not at the last token of the completion.
"""

from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from world import BASE, base_tokenizer, common, pairs, train


class LastPosition(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
inner = model.forward


def forward(input_ids=None, attention_mask=None, **kwargs):
    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    output = inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    output.logits = model.score(hidden[:, -1])
    return output


trainer = RewardTrainer(model=model, args=RewardConfig(**common(learning_rate=3e-4)),
                        train_dataset=Dataset.from_list(pairs()), processing_class=base_tokenizer())
model.forward = forward
train(trainer)
