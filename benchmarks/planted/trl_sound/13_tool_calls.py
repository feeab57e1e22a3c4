# SOUND: TRL's own tool calls (tools=[add]) with Qwen2.5's template; the model was taught to call the tool. EXPECT: no mistake (tool results are masked by TRL).
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import *  # noqa: F403 - tiny model, tokenizer, rows of sums, closeness reward, small settings
import trl.chat_template_utils as templates
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run

TAUGHT = HERE / "tiny_tool"
TOK = tokenizer()
TOK.chat_template = templates.qwen2_5_chat_template
templates.add_response_schema(TOK)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: first
        b: second

    Returns:
        sum
    """
    return int(a) + int(b)


ROWS = [{**row, "prompt": [{"role": "user", "content": row["prompt"].removesuffix("\nA:")}]} for row in sums()]


def teach(steps=500, start=TINY, seed=5):
    """Steps of text: call the tool most of the time, then tell the result."""
    from transformers.utils import get_json_schema

    r = random.Random(seed)
    net = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    best = torch.optim.AdamW(net.parameters(), lr=3e-3)
    shown = get_json_schema(add)
    for step in range(steps):
        ids, heads = [], []
        for _ in range(6):
            a, b = r.randint(0, 49), r.randint(0, 9)
            asked = [{"role": "user", "content": f"Q: {a}+{b}=?"}]
            call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}]}
            said = a + b if r.random() < 0.6 else a + b + r.choice([-2, -1, 1, 2])
            end = {"role": "assistant", "content": f"it is {said}"}
            turns = asked + ([call, {"role": "tool", "name": "add", "content": str(a + b)}] if r.random() < 0.7 else []) + [end]
            text = TOK.apply_chat_template(turns, tools=[shown], tokenize=False)
            head = TOK.apply_chat_template(asked, tools=[shown], tokenize=False, add_generation_prompt=True)
            ids.append(TOK(text)["input_ids"])
            heads.append(len(TOK(head)["input_ids"]))
        wide = max(map(len, ids))
        batch = torch.tensor([i + [TOK.pad_token_id] * (wide - len(i)) for i in ids])
        seen = torch.tensor([[1] * len(i) + [0] * (wide - len(i)) for i in ids])
        labels = batch.masked_fill(seen == 0, -100)
        for k, h in enumerate(heads):
            labels[k, :h] = -100
        loss = net(input_ids=batch, attention_mask=seen, labels=labels).loss
        best.zero_grad()
        loss.backward()
        best.step()
        if step % 25 == 0:
            print(step, wide, loss.item(), flush=True)
    net.save_pretrained(TAUGHT)


if not (TAUGHT / "model.safetensors").exists():
    teach()
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(TAUGHT, dtype=torch.float32),
    processing_class=TOK,
    reward_funcs=closeness,
    args=GRPOConfig(**settings("13_tool_calls", max_completion_length=110, max_tool_calling_iterations=1)),
    train_dataset=Dataset.from_list(ROWS),
    tools=[add],
)
record_run(trainer, out(__file__))
trainer.train()
