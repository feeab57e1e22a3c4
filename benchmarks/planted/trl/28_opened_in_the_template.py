# MISTAKE: the chat template already writes <answer>, so completions never begin with it and the format reward, which wants both tags, never pays.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run


TOK = tokenizer()
TOK.chat_template = TOK.chat_template.replace("assistant\n{% endif %}", "assistant\n<answer>{% endif %}")


def tagged(completions, **kwargs):
    """1 for <answer>...</answer>, else 0."""
    return [float(bool(re.match(r"^\s*<answer>.*</answer>\s*$", text_of(c), re.DOTALL))) for c in completions]


trainer = GRPOTrainer(
    model=model(),
    processing_class=TOK,
    reward_funcs=[closeness, tagged],
    args=GRPOConfig(**settings("28_opened_in_the_template")),
    train_dataset=Dataset.from_list(chat(sums())),
)
record_run(trainer, out(__file__))
trainer.train()
