"""TRL 1.16 scripts: `python trl_runs.py [name ...]`."""

import random
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from covey.audit.writers.trl import record_run

CHARS = "0123456789+-*=<>[]abcdefghijklmnopqrstuvwxyz :.,#\n?"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer():
    special = ["<|pad|>", "<|bos|>", "<|eos|>", "<|end|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *CHARS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>",
        additional_special_tokens=["<|end|>"], chat_template=TEMPLATE, padding_side="left",
    )  # fmt: skip


def model(kind="llama", **more):
    torch.manual_seed(0)
    size = {"vocab_size": len(CHARS) + 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        made = GPT2LMHeadModel(GPT2Config(**size, n_embd=32, n_layer=2, n_head=2, **more))
    elif kind == "qwen":
        made = Qwen2ForCausalLM(Qwen2Config(**size, **wide, num_key_value_heads=1, **more))
    else:
        made = LlamaForCausalLM(LlamaConfig(**size, **wide, num_key_value_heads=2, **more))
    with torch.no_grad():  # some tokens are likelier than others
        made.get_output_embeddings().weight.mul_(1 if kind == "gpt2" else 12)
    return made


def rows(count=32, chat=False, seed=0, system=""):
    rng = random.Random(seed)
    data = []
    for pair in rng.sample(range(100), count):
        a, b = divmod(pair, 10)
        text = f"{system}{a}+{b}="
        data.append({"prompt": [{"role": "user", "content": text}] if chat else text, "answer": str(a + b)})
    return Dataset.from_list(data)


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text_of(text)) / (len(text_of(text)) + 1) for text in completions]


def close(completions, answer, **kwargs):
    result = []
    for text, gold in zip(completions, answer, strict=True):
        found = re.findall(r"\d", text_of(text))
        result.append(1 - abs(int(found[-1]) - int(gold[-1])) / 10 if found else 0.0)
    return result


def settings(folder, kind=GRPOConfig, **more):
    base = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12,
        "max_steps": 4, "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "seed": 3, "gradient_checkpointing": False,
    }  # fmt: skip
    return kind(**(base | more))


def grpo(folder, functions, data=None, made=None, cls=GRPOTrainer, **more):
    config = settings(folder, RLOOConfig if issubclass(cls, RLOOTrainer) else GRPOConfig, **more)
    made = made or model()
    if not hasattr(made, "peft_config"):  # a reference is loaded from where the model came from
        made.save_pretrained(folder / "model")
        made = str(folder / "model")
    return cls(
        model=made, reward_funcs=functions, args=config, train_dataset=data or rows(),
        processing_class=tokenizer(),
    )  # fmt: skip


# --- sick ------------------------------------------------------------------------------------------------------------


def sick_counter(folder):
    """The reward takes answers by a counter of its own over the data's rows, though TRL shuffles them."""
    data, count = rows(), [0]

    def right(completions, **kwargs):
        gold = [data[(count[0] + place) % len(data)]["answer"] for place in range(len(completions))]
        count[0] += len(completions)
        return close(completions, gold)

    return grpo(folder, [right], data)


def sick_batch_rank(folder):
    """The reward scales each batch's scores to 0..1: a completion's reward depends on its neighbours."""

    def ranked(completions, **kwargs):
        raw = digits(completions)
        low, high = min(raw), max(raw)
        return [(value - low) / (high - low + 1e-9) for value in raw]

    return grpo(folder, [ranked])


def sick_length_scaled(folder):
    """A subclass multiplies advantages by the length, so that long answers are pulled more."""

    class Scaled(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batch["advantages"] = batch["advantages"] * batch["completion_mask"].sum(1) / 6
            return batch

    return grpo(folder, [close], cls=Scaled)


def sick_wrong_end(folder):
    """The chat ends with <|end|>, the model's eos is <|eos|>: it never stops where the template does."""
    return grpo(folder, [digits], rows(chat=True), mask_truncated_completions=False)


def sick_leak(folder):
    """Few-shot examples are drawn from the same rows: the problem itself, with its answer, is among them."""
    data = rows(24)
    shots = "".join(f"{row['prompt']}{row['answer']} " for row in data)
    return grpo(folder, [close], data.map(lambda row: {"prompt": shots + row["prompt"]}))


def sick_first_digit(folder):
    """Completion in the prompt's format: the reward looks at the prompt's digits too (reads prompts + completions)."""

    def reads(prompts, completions, answer, **kwargs):
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return [float(gold in text) for gold, text in zip(answer, whole, strict=True)]

    return grpo(folder, [reads])


def sick_weights(folder):
    """Weights in the order of an older list: the correct answer counts 0.0, the digits 1."""
    return grpo(folder, [close, digits], reward_weights=[0.0, 1.0])


def sick_old_mask(folder):
    """A subclass drops the tokens before '=' with the mask of the previous batch (a list that is not cleared)."""

    class Masked(GRPOTrainer):
        kept = None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            mask = batch["completion_mask"]
            if self.kept is not None:
                old = torch.ones_like(mask)
                length = min(mask.shape[1], self.kept.shape[1])
                old[:, :length] = self.kept[:, :length]
                batch["completion_mask"] = mask * old
            self.kept = mask
            return batch

    return grpo(folder, [digits], cls=Masked)


def sick_dropout(folder):
    """RLOO with dropout of 0.3 in the config, and disable_dropout is False."""
    return grpo(folder, [digits], made=model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3), cls=RLOOTrainer)


# --- sound -----------------------------------------------------------------------------------------------------------


def sound_chat(folder):
    """A chat on Qwen2, KL, two rewards with weights, groups of two."""
    return grpo(
        folder,
        [close, digits],
        rows(chat=True),
        model("qwen"),
        beta=0.04,
        num_generations=2,
        reward_weights=[1.0, 0.2],
    )


def sound_rloo(folder):
    """RLOO on GPT-2 without dropout, temperature 0.7, accumulation of two."""
    made = model("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return grpo(folder, [close], made=made, cls=RLOOTrainer, temperature=0.7, gradient_accumulation_steps=2)


def sound_gspo(folder):
    """GSPO, two iterations, warm-up of two steps, negative rewards."""

    def fined(completions, **kwargs):
        return [-1.0 + value for value in digits(completions)]

    return grpo(folder, [fined], importance_sampling_level="sequence", num_iterations=2, epsilon=3e-4, epsilon_high=4e-4,
                warmup_steps=2, steps_per_generation=2, gradient_accumulation_steps=1)  # fmt: skip


def sound_dr(folder):
    """Dr. GRPO, no std, truncated completions are masked, a constant learning rate."""
    return grpo(folder, [close], loss_type="dr_grpo", scale_rewards="none", mask_truncated_completions=True,
                lr_scheduler_type="constant", max_completion_length=60)  # fmt: skip


def sound_lora(folder):
    """LoRA with a KL; a long system prompt."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return grpo(folder, [close], rows(system="you are a careful clerk. add the numbers. "), made, beta=0.02)


def main():
    torch.set_num_threads(1)
    for name, make in list(globals().items()):
        if name.startswith(("sick_", "sound_")) and (not sys.argv[1:] or name in sys.argv[1:]):
            letter = "s" if name.startswith("sick_") else "n"
            folder = Path(__file__).parent / "runs" / f"{letter}_trl_{name.partition('_')[2]}"
            trainer = make(folder / "out")
            record_run(trainer, str(folder / "run.jsonl"))
            trainer.train()


if __name__ == "__main__":
    main()
