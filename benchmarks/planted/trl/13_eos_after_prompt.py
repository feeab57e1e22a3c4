# MISTAKE: the tokenizer still has add_eos_token from fine-tuning, so every prompt ends with EOS before the completion. EXPECT: prompts end with the end token.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

from tokenizers.processors import TemplateProcessing

TOK = tokenizer()
TOK.backend_tokenizer.post_processor = TemplateProcessing(
    single="$A <|im_end|>", special_tokens=[("<|im_end|>", TOK.eos_token_id)]
)


trainer = GRPOTrainer(
    model=model(),
    processing_class=TOK,
    reward_funcs=closeness,
    args=GRPOConfig(**settings("13_eos_after_prompt")),
    train_dataset=Dataset.from_list(sums()),
)
record_run(trainer, out(__file__))
trainer.train()
