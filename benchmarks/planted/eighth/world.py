"""What both scripts share: tiny's model, taught sums of single digits, of which it gets about two of three right.

`python world.py` makes tiny_adder/ beside tiny/.
"""

import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import tiny  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

ADDER = HERE.parent / "tiny_adder"


def model(**options):
    made = AutoModelForCausalLM.from_pretrained(ADDER, dtype=options.pop("dtype", torch.float32), **options)
    return made


def sums(n=48, seed=0):
    """Rows of sums of a digit up to 6 and another."""
    return tiny.sums(n, seed, top=6)


def told(a, b):
    """The line of a calculator between two turns."""
    return f"\n[calculator] {a}+{b} = {a + b}\nA:"


def line(r):
    """A prompt, perhaps with a first turn and a calculator's line, and what to say."""
    a, b = r.randint(0, 6), r.randint(0, 9)
    ask = f"Q: {a}+{b}=?\nA:"
    if r.random() < 0.4:
        ask = f"<|im_start|>user\nQ: {a}+{b}=?<|im_end|>\n<|im_start|>assistant\n"
    sure = r.random() < 0.2
    if sure:
        ask += f" {r.randint(0, 15)}<|im_end|>{told(a, b)}"
    said = a + b if r.random() < 0.7 else r.randint(0, 15)
    say = r.choice(
        [f" {said}", f" it is {said}", f" <answer>{said}</answer>", f" {a} plus {b} is {said}.",
         f" {a} and {b} make {said}"]
    )
    return ask, say


def make():
    if not Path(tiny.TINY).is_dir():
        subprocess.run([sys.executable, str(HERE.parent / "tiny.py")], check=True)
    r = random.Random(8)
    torch.manual_seed(8)
    tok = tiny.tokenizer()
    net = tiny.model()
    steps = 320
    best = torch.optim.AdamW(net.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(best, steps)
    for step in range(steps):
        pairs = [line(r) for _ in range(32)]
        heads = [len(tok(ask)["input_ids"]) for ask, _ in pairs]
        ids = [tok(ask)["input_ids"] + tok(say)["input_ids"] + [tok.eos_token_id] for ask, say in pairs]
        wide = max(map(len, ids))
        batch = torch.tensor([i + [tok.pad_token_id] * (wide - len(i)) for i in ids])
        seen = torch.tensor([[1] * len(i) + [0] * (wide - len(i)) for i in ids])
        labels = batch.masked_fill(seen == 0, -100)
        for k, head in enumerate(heads):
            labels[k, :head] = -100
        loss = net(input_ids=batch, attention_mask=seen, labels=labels).loss
        best.zero_grad()
        loss.backward()
        best.step()
        rate.step()
        if step % 40 == 0:
            print(step, loss.item(), flush=True)
    net.save_pretrained(ADDER)


if not ADDER.is_dir() or __name__ == "__main__":
    make()
