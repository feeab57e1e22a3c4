"""Real runs of TRL: two rewards of unlike scales, a clip at 1e-8, one seed for every step; and two sound ones."""
import random, sys
from pathlib import Path
HERE = Path(__file__).parent
import torch
torch.set_num_threads(1)
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

def tok():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    v = {"<|pad|>": 0, "<|end|>": 1, "<|start|>": 2}
    for a in alphabet: v[a] = len(v)
    t = Tokenizer(models.BPE(vocab=v, merges=[])); t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); t.decoder = decoders.ByteLevel()
    p = PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<|pad|>", eos_token="<|end|>")
    p.padding_side = "left"
    return p

def model(t, seed=0):
    torch.manual_seed(seed)
    m = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(t), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    return m

def warm(m, t, steps=150):
    "SFT: small sums with mistakes"
    random.seed(0); opt = torch.optim.AdamW(m.parameters(), 2e-3); m.train()
    for _ in range(steps):
        rows = []
        for _ in range(32):
            a, b = random.randrange(10), random.randrange(10)
            c = max(a, b) if random.random() < .5 else random.randrange(10)
            rows.append(f"The larger of {a} and {b} is" + f" {c}" + random.choice(["", ".", "!", ", ok"]) + "<|end|>")
        x = t(rows, return_tensors="pt", padding=True, padding_side="right")
        l = x.input_ids.masked_fill(x.attention_mask == 0, -100)
        loss = m(**x, labels=l).loss; opt.zero_grad(); loss.backward(); opt.step()
    m.eval(); return m

def correct(completions, answer, **k): return [1.0 if c.strip()[:1] == a else 0.0 for c, a in zip(completions, answer)]
def brevity(completions, **k): return [100.0 * len(c) for c in completions]
def tidy(completions, **k): return [0.1 if c.endswith(".") else 0.0 for c in completions]

def data(n=64):
    random.seed(3)
    p = [(random.randrange(10), random.randrange(10)) for _ in range(n)]
    return Dataset.from_list([{"prompt": f"The larger of {a} and {b} is", "answer": str(max(a, b))} for a, b in p])

class Reseed(TrainerCallback):
    def on_step_begin(self, *a, **k): torch.manual_seed(0)

def run(name, rewards, callbacks=(), rows=64, writer=True, steps=8, **kw):
    out = HERE / "runs" / name; out.mkdir(parents=True, exist_ok=True)
    t = tok(); m = warm(model(t), t)
    if kw.get("beta"):
        m.save_pretrained(out / "start"); t.save_pretrained(out / "start"); m = str(out / "start"); kw["model_init_kwargs"] = {"dtype": "float32"}
    cfg = GRPOConfig(output_dir=str(out), use_cpu=True, report_to=[], logging_steps=1, max_steps=steps, per_device_train_batch_size=16, num_generations=8,
                     max_completion_length=8, save_strategy="steps", save_steps=steps, seed=1, **{"learning_rate": 1e-4, **kw})
    tr = GRPOTrainer(model=m, reward_funcs=rewards, args=cfg, train_dataset=data(rows), processing_class=t, callbacks=list(callbacks))
    if writer:
        from covey.audit.writers.trl import record_run
        record_run(tr, str(out / "run.jsonl"))
    tr.train()
    for h in tr.state.log_history[:8]: print(name, round(h.get("reward", 0), 3), h.get("grad_norm"))

RUNS = {
 "s11t_hundredfold": lambda n: run(n, [correct, brevity]),
 "s12t_clip_1e-8": lambda n: run(n, [correct, tidy], max_grad_norm=1e-8, steps=12),
 "s13t_constant_seed": lambda n: run(n, [correct], callbacks=[Reseed()], rows=2, steps=8, learning_rate=1e-6),
 "n10t_two_iterations": lambda n: run(n, [correct, tidy], num_iterations=2, loss_type="dr_grpo", steps=8),
 "n14t_state_only": lambda n: run(n, [correct, tidy], writer=False, beta=0.02, steps=12, lr_scheduler_type="cosine", warmup_steps=3),
}
for n, f in RUNS.items():
    if len(sys.argv) < 2 or sys.argv[1] in n: f(n)
