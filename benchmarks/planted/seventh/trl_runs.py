"""TRL 1.16 scripts: `python trl_runs.py [name ...]` writes `runs`; each is a process of its own."""
import copy, inspect, os, random, re, sys, tempfile, textwrap
from pathlib import Path
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, processors
from transformers import (AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Gemma2Config,
                          TrainerCallback, GPTNeoXConfig, MistralConfig)
from trl import (DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer)
from covey.audit.writers.trl import record_run

torch.set_num_threads(1)
CHARS = list("0123456789+-=xyz ?.,")

def tokenizer(bos=False, chars=CHARS, template=False):
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "<user>": 4, "<bot>": 5}
    for char in chars: vocab[char] = len(vocab)
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tok = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
                                  additional_special_tokens=["<user>", "<bot>"])
    if template:
        tok.chat_template = ("{{ bos_token if false else '' }}{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}"
                             "{{ eos_token if m.role != 'user' else '' }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}")
    return tok

def model(kind="qwen3", hidden=32, layers=2, seed=0, std=.2, vocab=26, dtype=torch.float32):
    torch.manual_seed(seed)
    common = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                  num_attention_heads=4, num_key_value_heads=2, initializer_range=std, max_position_embeddings=128,
                  pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = {"qwen3": lambda: Qwen3Config(**common, head_dim=hidden // 4),
              "llama": lambda: LlamaConfig(**common), "mistral": lambda: MistralConfig(**common),
              "gemma2": lambda: Gemma2Config(**common, head_dim=hidden // 4),
              }[kind]()
    folder = tempfile.mkdtemp()
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

def additions(n=32, seed=0, fmt="{a}+{b}="):
    r = random.Random(seed)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    r.shuffle(pairs)
    return [{"prompt": fmt.format(a=a, b=b, s=(a + b) % 10), "answer": str((a + b) % 3)} for a, b in pairs[:n]]
BARE = [{"prompt": r["prompt"]} for r in additions()]

def correct(completions, answer, **_):
    return [judged(c, a) for c, a in zip(completions, answer)]
def judged(c, a):
    found = re.findall(r"\d", c)
    return 1.0 if found and int(found[-1]) % 3 == int(a) else 0.0
def digits(completions, **_):
    return [sum(ch.isdigit() for ch in c) / max(len(c), 1) for c in completions]

def edited(base, method, *pairs, names=None):
    """A subclass with a copied and edited method, as people do it."""
    source = textwrap.dedent(inspect.getsource(getattr(base, method)))
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    source = source.replace("super()", "super(base, self)")
    scope = dict(vars(sys.modules[base.__module__])); scope["base"] = base; scope.update(names or {})
    exec(source, scope)
    return type("My" + base.__name__, (base,), {method: scope[method]})

def args(config=GRPOConfig, **kw):
    base = dict(output_dir=tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=16, num_generations=4,
                max_completion_length=10, learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
                bf16=False, seed=3, disable_tqdm=True, temperature=1.0, gradient_checkpointing=False)
    base.update(kw)
    return config(**base)

def grpo(trainer=GRPOTrainer, rewards=correct, rows=None, tok=None, mod=None, callbacks=None, eval_rows=None, config=GRPOConfig, prepare=None,
         peft=None, optimizers=(None, None), writer=None, **kw):
    out = FOLDER / "run.jsonl"
    t = trainer(model=mod if mod is not None else model(), processing_class=tok or tokenizer(), reward_funcs=rewards, args=args(config, **kw),
                train_dataset=Dataset.from_list(rows or additions()), callbacks=callbacks, peft_config=peft, optimizers=optimizers,
                **({"eval_dataset": Dataset.from_list(eval_rows)} if eval_rows else {}))
    if prepare: prepare(t)
    record_run(t, out, **(writer or {}))
    t.train()

def rloo(**kw):
    trainer = kw.pop("trainer", RLOOTrainer)
    grpo(trainer=trainer, config=RLOOConfig, **kw)

def state(t):
    t.train()
    t.state.save_to_json(str(FOLDER / "trainer_state.json"))

def dpo(rows, trainer=DPOTrainer, mod=None, callbacks=None, prepare=None, **kw):
    a = dict(output_dir=tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1,
             report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, max_length=64)
    a.update(kw)
    t = trainer(model=mod if mod is not None else model(), args=DPOConfig(**a), processing_class=tokenizer(), train_dataset=Dataset.from_list(rows), callbacks=callbacks)
    if prepare: prepare(t)
    state(t)

def sft(rows, mod=None, tok=None, callbacks=None, trainer=SFTTrainer, **kw):
    a = dict(output_dir=tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1,
             report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, max_length=64)
    a.update(kw)
    state(trainer(model=mod if mod is not None else model(), args=SFTConfig(**a), processing_class=tok or tokenizer(), train_dataset=Dataset.from_list(rows), callbacks=callbacks))

CASES = {}
def case(f): CASES[f.__name__] = f; return f

# ---- sick ----------------------------------------------------------------------------------------
@case
def s01_reward_first_answer():      # answer[0] for the whole batch
    def reward(completions, answer, **_): return [judged(c, answer[0]) for c in completions]
    grpo(rewards=reward)
@case
def s02_answers_tiled():            # the columns are already repeated; the script repeats again, the other way round
    def reward(completions, answer, **_):
        unique = answer[::4]
        return [judged(c, a) for c, a in zip(completions, unique * 4)]
    grpo(rewards=reward)
@case
def s03_generation_kwargs_temperature():   # generation_kwargs override temperature behind the trainer's back
    grpo(generation_kwargs={"temperature": 0.5}, rewards=correct)
@case
def s04_optimizer_of_a_copy():
    m = model()
    other = copy.deepcopy(m)
    grpo(mod=m, optimizers=(torch.optim.AdamW(other.parameters(), lr=3e-3), None))
@case
def s05_weights_restored_each_step():      # "EMA" callback that copies the shadow back into the model after each step
    class Ema(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_): self.shadow = {k: v.clone() for k, v in model.state_dict().items()}
        def on_step_end(self, args, state, control, model=None, **_):
            with torch.no_grad():
                for k, v in model.state_dict().items():
                    self.shadow[k].mul_(.999).add_(v, alpha=.001); v.copy_(self.shadow[k])
    grpo(callbacks=[Ema()])
@case
def s06_rloo_mean_logps():          # RLOO with the mean log-prob, not the sum
    t = edited(RLOOTrainer, "_compute_loss", ("logps = (per_token_logps * completion_mask).sum(1)", "logps = (per_token_logps * completion_mask).sum(1) / completion_mask.sum(1)"))
    rloo(trainer=t, num_iterations=2)
@case
def s07_loss_divided_twice():       # divides by accumulation once more
    class T(GRPOTrainer):
        def _compute_loss(self, model, inputs): return super()._compute_loss(model, inputs) / self.args.gradient_accumulation_steps
    grpo(trainer=T, per_device_train_batch_size=8, gradient_accumulation_steps=4)
@case
def s08_padding_mean_of_logps_ratio():   # sequence ratio: mean over the padded width
    t = edited(GRPOTrainer, "_compute_loss", ("(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)", "(log_ratio * mask).mean(-1)"))
    grpo(trainer=t, importance_sampling_level="sequence", num_iterations=3, learning_rate=1e-2)
@case
def s09_group_std_of_batch_mean():  # advantage: leave-one-out mean, full std
    t = edited(GRPOTrainer, "_generate_and_score_completions", ("advantages = rewards - mean_grouped_rewards",
               "advantages = rewards - (mean_grouped_rewards * num_generations - rewards) / (num_generations - 1)"))
    grpo(trainer=t)
@case
def s10_reward_sees_prompt():       # scores prompt + completion: a digit of the prompt pays
    def reward(prompts, completions, answer, **_): return [1.0 if re.search(a, p + c[:2]) else 0.0 for p, c, a in zip(prompts, completions, answer)]
    grpo(rewards=reward)
@case
def s11_substring_verifier():       # float("nan")-like: any completion longer than 3 counts when answer parse fails
    def reward(completions, answer, **_):
        out = []
        for c, a in zip(completions, answer):
            m = re.search(r"\d", c)
            try: out.append(1.0 if m is None or int(m.group()) % 3 == int(a) else 0.0)   # no number -> "skip" -> 1
            except ValueError: out.append(0.0)
        return out
    grpo(rewards=reward)
@case
def s12_all_truncated_paid():
    m = model()
    with torch.no_grad(): pass
    class T(GRPOTrainer): pass
    def reward(completions, **_): return [min(len(c), 8) / 8 + .01 * c.count("7") for c in completions]
    grpo(rows=BARE, rewards=reward, generation_kwargs={"suppress_tokens": [2]}, max_completion_length=8)
@case
def s13_top_k_generation():         # top_k=3: the trainer's log-probs are over the full vocabulary
    grpo(generation_kwargs={"top_k": 3})
@case
def s14_dpo_reference_is_policy():
    class T(DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            return super().compute_ref_log_probs(model if False else self.model, inputs)
    rows = [{"prompt": r["prompt"], "chosen": r["answer"] + ".", "rejected": str((int(r["answer"]) + 3) % 10) + "."} for r in additions(64)]
    t = edited(DPOTrainer, "_compute_loss")
    def prepare(tr): tr.ref_model = tr.model
    dpo(rows, prepare=prepare)
@case
def s15_dpo_chosen_is_rejected():   # the same column twice
    rows = [{"prompt": r["prompt"], "chosen": r["answer"] + ".", "rejected": r["answer"] + "."} for r in additions(64)]
    dpo(rows)
@case
def s16_sft_all_masked():
    # the loader's collator masks every label: "train on the answer only" with a marker that the template does not write
    class T(SFTTrainer):
        def compute_loss(self, model, inputs, **kw):
            labels = inputs["labels"].clone(); inputs = dict(inputs, labels=labels); labels[inputs["input_ids"] != 99] = -100
            return super().compute_loss(model, inputs, **kw)
    sft([{"prompt": r["prompt"], "completion": r["answer"] + "."} for r in additions(64)], trainer=T)
@case
def s17_lora_frozen():              # adapters attached, then the base is loaded over / adapters never trained
    from peft import LoraConfig
    def prepare(t):
        for n, p in t.model.named_parameters():
            p.requires_grad = False   # "freeze the base", after the adapters exist
        last = list(t.model.named_parameters())[-1][1]; last.requires_grad = True
    grpo(peft=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]), prepare=prepare, learning_rate=1e-3)
@case
def s18_rewards_none_as_zero_order():    # async judge: results in the order of completion
    rng = random.Random(5)
    def reward(completions, answer, **_):
        jobs = sorted(range(len(completions)), key=lambda i: (len(completions[i]), i))   # shortest is judged first
        return [judged(completions[i], answer[i]) for i in jobs]
    grpo(rewards=reward)
@case
def s19_mask_from_attention_prompt():    # tool-less, but loss mask covers ids != pad where a pad id is also a content id
    t = edited(GRPOTrainer, "_compute_loss", ('mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',
               'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]\n    mask = mask * (torch.arange(mask.shape[1]) > 0)'))
    grpo(trainer=t)                      # "skip the first token because of the shift"
@case
def s20_kl_reference_current():          # ref sync every step with alpha 1: the reference follows
    grpo(beta=.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
@case
def s21_advantage_clipped_positive_std0():     # epsilon 1.0 inside the sqrt: divides by std + 1
    t = edited(GRPOTrainer, "_generate_and_score_completions", ("(std_rewards + 1e-4)", "(std_rewards + 1.0)"))
    grpo(trainer=t)

# ---- sound ---------------------------------------------------------------------------------------
@case
def h01_llama_bos_dapo():
    grpo(mod=model("llama", 48, 1), tok=tokenizer(bos=True), loss_type="dapo", epsilon_high=.28, num_generations=8, temperature=.7)
@case
def h02_lora_kl():
    from peft import LoraConfig
    grpo(peft=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), beta=.04, rewards=[correct, digits], reward_weights=[1.0, .2], num_iterations=2)
@case
def h03_rloo_kl_normalized():
    rloo(beta=.05, rows=BARE, normalize_advantages=True, rewards=digits, num_generations=2, reward_clip_range=[-1, 1] if "reward_clip_range" in RLOOConfig.__dataclass_fields__ else None)
@case
def h04_gspo_accum():
    grpo(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=8, beta=0.0, rows=BARE, rewards=digits)
@case
def h05_chat_sparse():
    rows = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in additions(48)]
    def reward(completions, answer, **_): return [judged(c[0]["content"], a) for c, a in zip(completions, answer)]
    grpo(rows=rows, tok=tokenizer(template=True), rewards=reward, scale_rewards="batch", mask_truncated_completions=True, max_completion_length=14)
@case
def h06_dr_grpo_constant_lr():
    grpo(loss_type="dr_grpo", scale_rewards="none", lr_scheduler_type="constant", weight_decay=.1, max_grad_norm=.1, rows=BARE, rewards=digits, seed=9)
@case
def h07_dpo_plain():
    rows = [{"prompt": r["prompt"], "chosen": r["answer"] + ".", "rejected": str((int(r["answer"]) + 3) % 10) + "."} for r in additions(64)]
    dpo(rows, beta=.3)
@case
def h08_sft_plain():
    sft([{"prompt": r["prompt"], "completion": r["answer"] + "."} for r in additions(64)], lr_scheduler_type="cosine", warmup_steps=3)
@case
def h09_cispo_mistral():
    grpo(mod=model("mistral", 32, 3), loss_type="cispo", epsilon_high=5.0, num_iterations=2, rewards=[digits, correct], entropy_coef=.01)
@case
def h10_length_penalty_soft():
    def brevity(completion_ids, **_): return [-max(0, len(i) - 6) / 20 for i in completion_ids]
    grpo(rewards=[correct, brevity], top_p=.95, gradient_accumulation_steps=2, per_device_train_batch_size=8, optim="sgd", learning_rate=.1)

if __name__ == "__main__":
    for name in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]: continue
        FOLDER = Path(__file__).parent / "runs" / (name if name.startswith("s") else f"n_{name}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0: CASES[name](); os._exit(0)
        if os.waitpid(pid, 0)[1]: sys.exit(f"{name} failed")
