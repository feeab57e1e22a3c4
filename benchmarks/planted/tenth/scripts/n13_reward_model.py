"""A reward model, with margins and centred rewards."""

from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from world import BASE, base_tokenizer, common, pairs, train

model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
args = RewardConfig(**common(learning_rate=3e-4, center_rewards_coefficient=0.01))
train(RewardTrainer(model=model, args=args, train_dataset=Dataset.from_list(pairs()),
                    processing_class=base_tokenizer()))
