"""The template writes a BOS, the tokenizer adds another (YangRui2015/Generalizable-Reward-Model#6, NeMo-RL#855).

Right answer: sequences begin with two BOS tokens.
"""

from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from world import BASE, base_tokenizer, common, pairs, train

tokenizer = base_tokenizer()
rows = []
for row in pairs():
    rows.append({f"{k}_ids": [tokenizer.bos_token_id] + tokenizer(
        "<bos>" + tokenizer.apply_chat_template(row["prompt"] + row[k], tokenize=False), add_special_tokens=False
    )["input_ids"] for k in ("chosen", "rejected")})
model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
train(RewardTrainer(model=model, args=RewardConfig(**common(learning_rate=3e-4)),
                    train_dataset=Dataset.from_list(rows), processing_class=tokenizer))
