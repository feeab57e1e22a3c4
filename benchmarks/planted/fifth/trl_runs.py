"""TRL with a reward that takes the answer of the first row for all, and with one that does not."""
import random, torch
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from covey.audit.writers.trl import record_run
HERE = Path(__file__).parent
torch.set_num_threads(1)
vocab = {c: i for i, c in enumerate(["<pad>", "<bos>", "<eos>"] + list("0123456789+=? []"))}
t = Tokenizer(models.WordLevel(vocab, unk_token="?")); t.pre_tokenizer = pre_tokenizers.Split("", "isolated"); t.decoder = decoders.Fuse()
tok = PreTrainedTokenizerFast(tokenizer_object=t, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left")
torch.manual_seed(0)
m = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocab), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
D = HERE / "tiny"; m.save_pretrained(D); tok.save_pretrained(D); tok = PreTrainedTokenizerFast.from_pretrained(D)
rng = random.Random(0)
rows = []
for _ in range(64):
    a, b = rng.randrange(10), rng.randrange(10); rows.append({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)})
def run(name, sick):
    def right(completions, answer, **kw):
        # the mistake: answer is a list, a value for each completion; the first is used for all
        return [float((answer[0] if sick else a) in c) for c, a in zip(completions, answer)]
    folder = HERE / "runs" / name; folder.mkdir(parents=True, exist_ok=True)
    cfg = GRPOConfig(output_dir=str(folder), per_device_train_batch_size=16, num_generations=4, max_completion_length=8, max_steps=6, logging_steps=1, learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False, save_strategy="no", beta=0.02)
    tr = GRPOTrainer(model=Qwen2ForCausalLM.from_pretrained(D), reward_funcs=right, args=cfg, train_dataset=Dataset.from_list(rows), processing_class=tok)
    record_run(tr, folder / "run.jsonl")
    tr.train()
run("s31", True); run("n27", False)
