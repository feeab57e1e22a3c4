# MISTAKE: prompts were rendered with apply_chat_template and then wrapped as a user message, which TRL renders again. EXPECT: the prompt holds the chat template twice (<|im_start|> markers inside the user's message).
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


TOK = tokenizer()
ROWS = [
    {
        **row,
        "prompt": [
            {
                "role": "user",
                "content": TOK.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True),
            }
        ],
    }
    for row in chat(sums())
]


trainer = GRPOTrainer(
    model=model(),
    processing_class=TOK,
    reward_funcs=closeness,
    args=GRPOConfig(**settings("12_template_applied_twice")),
    train_dataset=Dataset.from_list(ROWS),
)
record_run(trainer, out(__file__))
trainer.train()
