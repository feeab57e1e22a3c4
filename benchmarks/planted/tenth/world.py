"""A task that is visible in 30 steps: sums of two digits, a base model that already answers half of them."""

import os
import random
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from covey.audit.writers.trl import record_run

torch.set_num_threads(1)
BASE = Path(os.environ.get("BASE", Path(__file__).parent / "tiny"))
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUMS = [(a, b) for a in range(5) for b in range(5)]


def new_tokenizer():
    letters = SPECIAL + list("abcdefghijklmnopqrstuvwxyz0123456789+-=.,:?!#<>/\\ \n'")
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        bos_token="<bos>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def reply(a, b, rng, right):
    value = a + b if right else rng.randrange(9)
    return rng.choice([f"{a}+{b}={value}", f"it is {value}", f"so: {a} and {b} is {value}."])


def question(a, b):
    return f"{a}+{b}?"


def user(a, b):
    return [{"role": "user", "content": question(a, b)}]


def prepare():
    """Train the base model, half of whose sums are right, and save it."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = new_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(600):
        rows = []
        for _ in range(32):
            a, b = rng.choice(SUMS)
            messages = [*user(a, b), {"role": "assistant", "content": reply(a, b, rng, rng.random() < 0.5)}]
            rows.append(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))
        batch = tokenizer(rows, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 600)
    model.save_pretrained(BASE)
    tokenizer.save_pretrained(BASE)
    print("loss", loss.item())


def base(**options):
    return AutoModelForCausalLM.from_pretrained(BASE, **options)


def base_tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def problems(make_prompt=user):
    return Dataset.from_list([{"prompt": make_prompt(a, b), "answer": str(a + b)} for a, b in SUMS])


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else None


def correct(completions, answer, **_):
    return [float(last_number(text_of(c)) == gold) for c, gold in zip(completions, answer)]


def grpo_config(**settings):
    defaults = dict(
        output_dir="out", per_device_train_batch_size=32, num_generations=8, max_completion_length=24,
        learning_rate=1e-3, max_steps=16, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        lr_scheduler_type="constant", disable_tqdm=True, bf16=False, gradient_checkpointing=False, seed=1,
    )
    return GRPOConfig(**{**defaults, **settings})


def grpo(cls=GRPOTrainer, model=None, rewards=correct, data=None, tokenizer=None, peft_config=None, **settings):
    return cls(
        model=model if model is not None else base(),
        reward_funcs=rewards,
        args=grpo_config(**settings),
        train_dataset=data if data is not None else problems(),
        processing_class=tokenizer or base_tokenizer(),
        peft_config=peft_config,
    )


def common(**settings):
    """Settings of the trainers that do not sample."""
    defaults = dict(
        output_dir="out", per_device_train_batch_size=16, learning_rate=5e-4, max_steps=24, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, seed=1, lr_scheduler_type="constant",
    )
    return {**defaults, **settings}


def pairs(seed=0, count=160):
    """Preferences: a right sum over an incorrect one, in words of the base model."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.choice(SUMS)
        wrong = rng.choice([v for v in range(9) if v != a + b])
        texts = []
        for value in (a + b, wrong):
            texts.append(rng.choice([f"{a}+{b}={value}", f"it is {value}", f"so: {a} and {b} is {value}."]))
        rows.append({"prompt": user(a, b), **{k: [{"role": "assistant", "content": t}]
                    for k, t in zip(("chosen", "rejected"), texts)}})
    return rows


def dpo(rows=None, model=None, collator=None, peft_config=None, **settings):
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=model or base(), args=DPOConfig(**common(**{"learning_rate": 1e-4, "beta": 0.1, **settings})),
        train_dataset=Dataset.from_list(pairs() if rows is None else rows), processing_class=base_tokenizer(),
        data_collator=collator, peft_config=peft_config,
    )


def conversations(seed=0, count=160):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.choice(SUMS)
        answer = {"role": "assistant", "content": reply(a, b, rng, True)}
        rows.append({"prompt": user(a, b), "completion": [answer]})
    return rows


def sft(rows=None, model=None, tokenizer=None, cls=None, peft_config=None, collator=None, data=None, **settings):
    from trl import SFTConfig, SFTTrainer

    return (cls or SFTTrainer)(
        model=model or base(), args=SFTConfig(**common(**settings)),
        train_dataset=data or Dataset.from_list(conversations() if rows is None else rows),
        processing_class=tokenizer or base_tokenizer(), peft_config=peft_config, data_collator=collator,
    )


def train(trainer):
    """Record the run in the file named on the command line, and train."""
    record_run(trainer, sys.argv[1])
    trainer.train()


if __name__ == "__main__":
    prepare()
