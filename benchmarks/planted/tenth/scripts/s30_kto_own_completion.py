"""The completions for KTO's KL estimate are reversed in batches of three, so the middle one is its own (trl#1911).

Right answer: KL is estimated from a prompt's own completion, not from one of another prompt.
"""

from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from world import base, base_tokenizer, common, pairs, train


class Reversed(KTOTrainer):
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        size = args.per_device_train_batch_size

        def reverse(rows):
            return {"KL_completion_ids": rows["completion_ids"][::-1]}

        return dataset.map(reverse, batched=True, batch_size=size)


rows = []
for row in pairs():
    rows.append({"prompt": row["prompt"], "completion": row["chosen"], "label": True})
    rows.append({"prompt": row["prompt"], "completion": row["rejected"], "label": False})
import random

random.Random(1).shuffle(rows)
args = KTOConfig(**common(per_device_train_batch_size=3, learning_rate=1e-4, max_steps=40))
train(Reversed(model=base(), args=args, train_dataset=Dataset.from_list(rows), processing_class=base_tokenizer()))
