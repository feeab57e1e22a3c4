"""What the planted scripts share: a tiny Qwen2 model with a byte-level tokenizer (tiny/), rows of sums, rewards.

`python tiny.py` makes tiny/ again: random weights, then 600 steps of supervised text so that completions end,
differ in length, and are right about as often as not.
"""

import os
import random
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("WANDB_DISABLED", "true")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)
HERE = Path(__file__).parent
TINY = str(HERE / "tiny")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def out(file):
    """The .jsonl beside a script."""
    path = Path(file).with_suffix(".jsonl")
    path.unlink(missing_ok=True)
    return str(path)


def model(**kw):
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=kw.pop("dtype", torch.float32), **kw)


def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def sums(n=64, seed=0, top=49):
    """Rows of sums with prompts of several lengths."""
    r = random.Random(seed)
    rows, seen = [], set()
    while len(rows) < n:
        a, b = r.randint(0, top), r.randint(0, 9)
        if (a, b) in seen:
            continue
        seen.add((a, b))
        rows.append({"prompt": f"Q: {a}+{b}=?\nA:", "answer": str(a + b)})
    return rows


def chat(rows, system=None):
    head = [{"role": "system", "content": system}] if system else []
    return [{**r, "prompt": head + [{"role": "user", "content": r["prompt"].removesuffix("\nA:")}]} for r in rows]


def text_of(c):
    return c if isinstance(c, str) else c[-1]["content"]


def number(text):
    """The last whole number in a text, as text, or None."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


def closeness(completions, answer, **kwargs):
    """1 for the right number, less the farther the last number is, 0 without a number."""
    paid = []
    for c, gold in zip(completions, answer):
        said = number(text_of(c))
        paid.append(0.0 if said is None or len(said) > 6 else 1.0 / (1.0 + abs(int(said) - int(gold)) / 4))
    return paid


def settings(name, **kw):
    """Small settings of GRPOConfig: 4 prompts x 4 completions a step, 8 steps."""
    base = dict(
        output_dir=str(Path(tempfile.gettempdir()) / "covey-planted" / name),
        max_steps=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        num_generations=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        max_completion_length=24,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=7,
    )
    return {**base, **kw}


@torch.no_grad()
def sample(net, tok, contexts, most, temperature=1.0):
    """Sample after each context (lists of ids) up to the end token; return new ids and their log-probs."""
    net_was = net.training
    net.eval()
    rows, got, logps = [list(c) for c in contexts], [[] for _ in contexts], [[] for _ in contexts]
    live = list(range(len(rows)))
    for _ in range(most):
        wide = max(len(rows[i]) for i in live)
        ids = torch.tensor([[tok.pad_token_id] * (wide - len(rows[i])) + rows[i] for i in live])
        seen = torch.tensor([[0] * (wide - len(rows[i])) + [1] * len(rows[i]) for i in live])
        logp = (net(input_ids=ids, attention_mask=seen).logits[:, -1] / temperature).log_softmax(-1)
        new = torch.multinomial(logp.exp(), 1)[:, 0]
        for k, i in enumerate(live):
            rows[i].append(new[k].item())
            got[i].append(new[k].item())
            logps[i].append(logp[k, new[k]].item())
        live = [i for i in live if got[i][-1] != tok.eos_token_id]
        if not live:
            break
    net.train(net_was)
    return got, logps


def _make():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    r = random.Random(1)
    texts = [_line(r)[1] for _ in range(2000)] + ["user assistant system tool add calc answer result"] * 50
    tok.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(TINY)
    torch.manual_seed(0)
    net = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(fast),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    net.generation_config.eos_token_id = fast.eos_token_id
    net.generation_config.pad_token_id = fast.pad_token_id
    best = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(600):
        pairs = [_line(r) for _ in range(32)]
        ids = [fast(p)["input_ids"] + fast(t)["input_ids"] + [fast.eos_token_id] for p, t in pairs]
        heads = [len(fast(p)["input_ids"]) for p, _ in pairs]
        wide = max(map(len, ids))
        batch = torch.tensor([i + [fast.pad_token_id] * (wide - len(i)) for i in ids])
        seen = torch.tensor([[1] * len(i) + [0] * (wide - len(i)) for i in ids])
        labels = batch.masked_fill(seen == 0, -100)
        for k, h in enumerate(heads):
            labels[k, :h] = -100
        loss = net(input_ids=batch, attention_mask=seen, labels=labels).loss
        best.zero_grad()
        loss.backward()
        best.step()
        if step % 100 == 0:
            print(step, loss.item(), flush=True)
    net.save_pretrained(TINY)


def _line(r):
    a, b = r.randint(0, 49), r.randint(0, 9)
    said = a + b if r.random() < 0.6 else a + b + r.choice([-3, -2, -1, 1, 2, 3, 10])
    ask = f"Q: {a}+{b}=?\nA:"
    if r.random() < 0.4:
        ask = f"<|im_start|>user\nQ: {a}+{b}=?<|im_end|>\n<|im_start|>assistant\n"
    say = r.choice([f" {said}", f" it is {said}", f" <answer>{said}</answer>", f" {a} plus {b} is {said}.", f" {a} and {b} make {said}"])
    return ask, say


if __name__ == "__main__":
    _make()
    sys.exit()
