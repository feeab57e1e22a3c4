"""KTO with three undesirable answers for each desirable one, weighted accordingly."""

import random

from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from world import base, base_tokenizer, common, pairs, train

rows = []
for index, row in enumerate(pairs()):
    rows.append({"prompt": row["prompt"], "completion": row["rejected"], "label": False})
    if index % 3 == 0:
        rows.append({"prompt": row["prompt"], "completion": row["chosen"], "label": True})
random.Random(1).shuffle(rows)
args = KTOConfig(**common(learning_rate=1e-4, desirable_weight=3.0))
train(KTOTrainer(model=base(), args=args, train_dataset=Dataset.from_list(rows), processing_class=base_tokenizer()))
