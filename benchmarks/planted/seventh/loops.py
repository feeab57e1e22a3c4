"""Loops in plain torch, and dumps of verl: `python loops.py [name ...]` writes `runs`."""
import copy, json, math, os, random, re, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from covey.audit.writers.recorder import Recorder
torch.set_num_threads(1)
PAD, BOS, EOS = 0, 1, 2
TOOL, SEP = 3, 4
CH = {c: i + 6 for i, c in enumerate("0123456789+-=?.xyz")}
RE = {v: k for k, v in CH.items()} | {TOOL: "@", SEP: "|"}
V = 24
enc = lambda s: [CH[c] for c in s]
text_of = lambda ids: "".join(RE.get(i, "") for i in ids)
OUT = Path(__file__).parent / "runs"
def folder_of(name):
    folder = OUT / (("s_" if name.startswith("l") else "n_") + name); folder.mkdir(parents=True, exist_ok=True)
    return folder

class Lm(nn.Module):
    """A small causal transformer with learned places, or a GRU."""
    def __init__(self, d=32, layers=2, seed=0, scale=1.0, gru=False, critic=False):
        super().__init__(); torch.manual_seed(seed)
        self.e = nn.Embedding(V, d); self.gru = gru
        if gru: self.core = nn.GRU(d, d, layers, batch_first=True)
        else:
            self.p = nn.Embedding(160, d)
            self.core = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers))
        self.head = nn.Linear(d, V); self.head.weight.data.mul_(3 * scale); self.head.bias.data[EOS] += 3.0
        self.value = nn.Linear(d, 1) if critic else None
    def hidden(self, ids, mask=None, places=None):
        x = self.e(ids)
        if self.gru: return self.core(x)[0]
        t = ids.shape[1]
        x = x + self.p(places if places is not None else torch.arange(t)[None])
        causal = torch.triu(torch.full((t, t), float("-inf")), 1)
        pad = None if mask is None else torch.zeros(mask.shape).masked_fill(mask == 0, -1e9)
        for layer in self.core: x = layer(x, src_mask=causal, src_key_padding_mask=pad)
        return x
    def forward(self, ids, mask=None, places=None): return self.head(self.hidden(ids, mask, places))

def additions(n=32, seed=0, digits=1):
    r = random.Random(seed); hi = 10 ** digits
    rows = []
    for _ in range(n):
        a, b = r.randrange(hi), r.randrange(hi)
        rows.append({"question": f"{a}+{b}=", "answer": str(a + b)[-1]})
    seen = {}
    for row in rows: seen[row["question"]] = row
    return list(seen.values())

class Loop:
    settings = {"loss_type": "grpo", "scale_rewards": "group", "epsilon": .2, "beta": 0.0, "temperature": 1.0, "num_generations": 4, "max_completion_length": 10, "learning_rate": 3e-3}
    n, G, T, steps, epochs, minis, micro, temp, lr, beta, eps = 4, 4, 10, 20, 1, 1, 1, 1.0, 3e-3, 0.0, .2
    full = True            # records what a plain forward pass gives, and after_logprobs
    opt = "adam"
    def __init__(self, name):
        torch.manual_seed(self.seed()); self.name = name
        self.model = self.make(); self.ref = copy.deepcopy(self.model); self.sampler = self.model
        self.optimizer = self.make_opt(); self.rows = self.data(); self.order = list(range(len(self.rows))); self.at = 0
        self.rng = random.Random(self.seed()); self.rng.shuffle(self.order)
        settings = dict(self.settings, num_generations=self.G, max_completion_length=self.T, temperature=self.temp, learning_rate=self.lr, beta=self.beta, epsilon=self.eps)
        settings.update(self.extra()); settings = {k: v for k, v in settings.items() if v is not None}
        data = self.header_data()
        path = folder_of(name) / "run.jsonl"
        self.file = Recorder(path, framework="mine", settings=settings, tokens={"bos": BOS, "eos": [EOS], "pad": PAD}, **({"data": data} if data else {}))
        self.number = self.step = 0
    def seed(self): return 0
    def extra(self): return {}
    def header_data(self): return None
    def make(self): return Lm()
    def make_opt(self): return torch.optim.Adam(self.model.parameters(), lr=self.lr) if self.opt == "adam" else torch.optim.SGD(self.model.parameters(), lr=self.lr)
    def data(self): return additions(48)
    def batch(self):
        rows = []
        for _ in range(self.n):
            if self.at == len(self.order): self.at = 0; self.rng.shuffle(self.order)
            rows.append(self.rows[self.order[self.at]]); self.at += 1
        return rows
    def prompt(self, row): return [BOS] + enc(row["question"])
    def reward(self, row, text, ids): return float(row["answer"] in text[:4])
    def rewards(self, samples):
        for s in samples: s["rewards"] = {"correct": self.reward(s["row"], s["text"], s["ids"])}; s["reward"] = sum(s["rewards"].values())
    def pick(self, logits): return torch.distributions.Categorical(logits=logits / self.temp).sample().item()
    @torch.no_grad()
    def complete(self, prompt):
        ids, lps, inserted = [], [], []
        while len(ids) < self.T:
            logits = self.sampler(torch.tensor([prompt + ids]))[0, -1]
            token = self.pick(logits)
            ids.append(token); lps.append((logits / self.temp).log_softmax(-1)[token].item()); inserted.append(0)
            if token == EOS: break
        return ids, lps, inserted
    @torch.no_grad()
    def complete_all(self, prompt):
        if type(self).complete is not Loop.complete: return [self.complete(prompt) for _ in range(self.G)]
        ids, lps = [[] for _ in range(self.G)], [[] for _ in range(self.G)]
        rows = torch.tensor([prompt] * self.G)
        for _ in range(self.T):
            lp = (self.sampler(rows)[:, -1] / self.temp).log_softmax(-1); tokens = torch.distributions.Categorical(logits=lp).sample()
            for i, t in enumerate(tokens.tolist()):
                if not ids[i] or ids[i][-1] != EOS: ids[i].append(t); lps[i].append(lp[i, t].item())
            rows = torch.cat([rows, tokens[:, None]], 1)
            if all(x[-1] == EOS for x in ids): break
        return [(i, l, [0] * len(i)) for i, l in zip(ids, lps)]
    def rollout(self):
        samples = []
        for g, row in enumerate(self.batch()):
            prompt = self.prompt(row)
            for ids, lps, inserted in self.complete_all(prompt):
                samples.append({"row": row, "prompt_ids": prompt, "ids": ids, "text": text_of(ids), "sampler_logprobs": lps, "group": g, "inserted": inserted})
        self.rewards(samples)
        return samples
    def advantages(self, samples):
        r = torch.tensor([s["reward"] for s in samples]).view(-1, self.G)
        return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()
    def pad(self, samples):            # right-padded prompt + completion, so places are right
        width = max(len(s["prompt_ids"]) + len(s["ids"]) for s in samples)
        ids = torch.full((len(samples), width), PAD)
        for i, s in enumerate(samples): row = s["prompt_ids"] + s["ids"]; ids[i, :len(row)] = torch.tensor(row)
        return ids
    def logps(self, model, samples):   # list of (T,) tensors
        ids = self.pad(samples); logits = model(ids)[:, :-1] / self.temp
        lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return self.cut(lp, samples)
    def cut(self, lp, samples):
        return [lp[i, len(s["prompt_ids"]) - 1:len(s["prompt_ids"]) - 1 + len(s["ids"])] for i, s in enumerate(samples)]
    def plain(self, samples, temp=None):
        with torch.no_grad():
            ids = Loop.pad(self, samples); lp = (self.model(ids)[:, :-1] / (temp or self.temp)).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            return [x.tolist() for x in Loop.cut(self, lp, samples)]
    def mask(self, s): return [1 - x for x in s["inserted"]]
    def kl(self, lp, ref): d = ref - lp; return d.exp() - d - 1
    def surrogate(self, ratio, a): return -torch.min(ratio * a, ratio.clamp(1 - self.eps, 1 + self.eps) * a)
    def reduce(self, losses, masks): return torch.stack([(l * m).sum() / m.sum().clamp(min=1) for l, m in zip(losses, masks)]).mean()
    def loss(self, samples, lps):
        losses, masks = [], []
        for s, lp in zip(samples, lps):
            ratio = (lp - s["old"]).exp(); l = self.surrogate(ratio, s["advantage"])
            if self.beta: l = l + self.beta * self.kl(lp, s["ref"])
            losses.append(l); masks.append(torch.tensor(self.mask(s), dtype=torch.float))
        return self.reduce(losses, masks)
    def before(self): self.optimizer.zero_grad()
    def after(self): pass
    def micro_weight(self, part, all_): return len(part) / len(all_)
    def clip_grad(self): return float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
    def order_old(self, samples):
        with torch.no_grad():
            for s, lp in zip(samples, self.logps(self.model, samples)): s["old"] = lp.detach()
    def update(self, part):
        self.before(); total, rows = 0.0, []
        size = math.ceil(len(part) / self.micro)
        for start in range(0, len(part), size):
            micro = part[start:start + size]
            lps = self.logps(self.model, micro); loss = self.loss(micro, lps) * self.micro_weight(micro, part)
            for lp in lps: lp.retain_grad()
            loss.backward(); total += float(loss.detach())
            for s, lp in zip(micro, lps):
                rows.append({"rollout": s["rollout"], "completion": s["place"], "mask": self.mask(s), "logprobs": lp.detach().tolist(), "old_logprobs": s["old"].tolist(), "advantage": float(s["advantage"]), "gradients": lp.grad.tolist()})
                if self.beta: rows[-1]["ref_logprobs"] = s["ref"].tolist()
        norm = self.clip_grad(); held = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer.step(); self.after()
        changed = sum(int((a != b).sum()) for a, b in zip(held, self.model.parameters())) / sum(a.numel() for a in held)
        if self.full:
            for row, lp in zip(rows, self.plain(part)): row["after_logprobs"] = lp
        self.file.write(kind="update", step=self.step, rows=rows, loss=total, grad_norm=norm, learning_rate=self.optimizer.param_groups[0]["lr"], weights_changed=changed)
        self.step += 1
    def record(self, samples):
        fields = ("prompt_ids", "ids", "text", "sampler_logprobs", "group", "row", "rewards", "reward", "advantage") + (("inserted",) if self.tools else ())
        out = [{k: (float(s[k]) if k == "advantage" else s[k]) for k in fields if k in s} | {"prompt": text_of(s["prompt_ids"])} for s in samples]
        if self.full:
            for c, a, b in zip(out, self.plain(samples), self.plain(samples, 1.0)): c["model_logprobs"], c["model_logprobs_at_1"] = a, b
        self.file.write(kind="rollout", number=self.number, step=self.step, completions=out)
    tools = False
    def sync(self): pass
    def run(self):
        for _ in range(self.steps):
            self.sync(); samples = self.rollout()
            for i, (s, a) in enumerate(zip(samples, self.advantages(samples))): s.update(advantage=a, rollout=self.number, place=i)
            self.record(samples); self.order_old(samples)
            if self.beta:
                with torch.no_grad():
                    for s, lp in zip(samples, self.logps(self.ref, samples)): s["ref"] = lp
            for _ in range(self.epochs):
                order = list(range(len(samples))); self.rng.shuffle(order); size = len(samples) // self.minis
                for start in range(0, len(samples), size): self.update([samples[i] for i in order[start:start + size]])
            self.number += 1

CASES = {}
def case(c): CASES[c.__name__] = c; return c

# ---------------------------------------------------------------- sick
@case
class l01_view_transposed(Loop):       # rewards.view(G, n): groups are strided
    def advantages(self, s):
        r = torch.tensor([x["reward"] for x in s]).view(self.G, -1)
        return ((r - r.mean(0, keepdim=True)) / (r.std(0, keepdim=True) + 1e-4)).flatten()
@case
class l02_log_ratio_clamped(Loop):     # the clip acts on the log-ratio
    epochs = 3
    def loss(self, samples, lps):
        losses = [-torch.min((lp - s["old"]).exp() * s["advantage"], (lp - s["old"]).clamp(1 - self.eps, 1 + self.eps).exp() * s["advantage"]) for s, lp in zip(samples, lps)]
        return self.reduce(losses, [torch.ones(len(lp)) for lp in lps])
@case
class l03_replay_old_recomputed(Loop): # a buffer of three rollouts, whose old log-probs are computed anew
    def run(self):
        buffer = []
        for _ in range(self.steps):
            samples = self.rollout()
            for i, (s, a) in enumerate(zip(samples, self.advantages(samples))): s.update(advantage=a, rollout=self.number, place=i)
            self.record(samples); buffer = (buffer + samples)[-48:]; self.number += 1
            part = self.rng.sample(buffer, min(16, len(buffer))); self.order_old(part); self.update(part)
@case
class l04_old_after_first_step(Loop):  # old log-probs are taken lazily, after the first minibatch has moved the weights
    epochs, minis = 2, 2
    def order_old(self, samples): self.pending = samples
    def update(self, part):
        for s in part:
            if "old" not in s: s["old"] = self.logps(self.model, [s])[0].detach()
        super().update(part)
@case
class l05_left_pad_positions(Loop):    # left padding, no position ids, no attention mask
    def data(self): return additions(24) + additions(24, 1, digits=3)
    def logps(self, model, samples):
        width = max(len(s["prompt_ids"]) for s in samples); T = max(len(s["ids"]) for s in samples)
        ids = torch.tensor([[PAD] * (width - len(s["prompt_ids"])) + s["prompt_ids"] + s["ids"] + [PAD] * (T - len(s["ids"])) for s in samples])
        lp = (model(ids)[:, :-1] / self.temp).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [lp[i, width - 1:width - 1 + len(s["ids"])] for i, s in enumerate(samples)]
@case
class l06_zero_grad_missing(Loop):
    full = False
    lr = 1e-3
    def before(self): pass
@case
class l07_micro_token_means(Loop):     # each micro-batch its own token mean, averaged: short micro-batches count more
    micro = 4
    settings = dict(Loop.settings, loss_type="dapo")
    def reduce(self, losses, masks): return sum((l * m).sum() for l, m in zip(losses, masks)) / sum(m.sum() for m in masks)
    def micro_weight(self, part, all_): return 1 / self.micro
@case
class l08_minibatch_whitened(Loop):    # advantages are whitened again in each minibatch
    minis = 2
    def update(self, part):
        a = torch.stack([s["advantage"] for s in part]); w = (a - a.mean()) / (a.std() + 1e-8)
        super().update([dict(s, advantage=x) for s, x in zip(part, w)])
@case
class l09_optimizer_rebuilt(Loop):     # Adam is built anew for each rollout: its moments are lost
    def before(self): self.optimizer = self.make_opt(); self.optimizer.zero_grad()
@case
class l10_turn_history_dropped(Loop):  # two turns; the trainer's context leaves out the first answer of the tool
    tools, T, temp = True, 14, 1.0
    def complete(self, prompt):
        ids, lps, ins = [], [], []
        for turn in range(2):
            part, lp, _ = super().complete(prompt + ids)
            room = 4 if turn == 0 else self.T - len(ids)
            part, lp = part[:room], lp[:room]; ids += part; lps += lp; ins += [0] * len(part)
            if part[-1] == EOS: break
            if turn == 0:
                answer = [TOOL] + enc(str(len(part))) + [SEP]; ids += answer; lps += [0.0] * len(answer); ins += [1] * len(answer)
        return ids, lps, ins
    def reward(self, row, text, ids): return float(row["answer"] in text)
    def logps(self, model, samples):
        out = []
        for s in samples:
            keep = [i for i, x in enumerate(s["inserted"]) if not x]; seq = s["prompt_ids"] + [s["ids"][i] for i in keep]; P = len(s["prompt_ids"])
            lp = model(torch.tensor([seq]))[0, :-1].log_softmax(-1).gather(-1, torch.tensor(seq[1:])[:, None])[P - 1:, 0]
            full = torch.zeros(len(s["ids"])); full[keep] = lp; out.append(full)
        return out
@case
class l11_tool_result_trained(Loop):   # tool's words are in the loss, the record has no inserted
    T = 14
    def complete(self, prompt):
        ids, lps, _ = super().complete(prompt); ids, lps = ids[:4], lps[:4]
        if ids[-1] == EOS: return ids, lps, [0] * len(ids)
        answer = [TOOL] + enc("=" + str(len(ids))) + [SEP]
        rest, more, _ = super().complete(prompt + ids + answer); rest, more = rest[:self.T - 8], more[:self.T - 8]
        return ids + answer + rest, lps + [0.0] * len(answer) + more, [0] * len(ids + answer + rest)
    def reward(self, row, text, ids): return float(row["answer"] in text)
@case
class l12_reward_baseline_ema_late(Loop):   # REINFORCE with a running mean that is updated with the batch's own sum, not its mean
    G = 1; n = 16
    settings = {"algorithm": "reinforce", "temperature": 1.0}
    def reward(self, row, text, ids): return float(sum(c.isdigit() for c in text)) / 5
    base = 0.0
    def advantages(self, s):
        r = torch.tensor([x["reward"] for x in s]); self.base = .9 * self.base + .1 * float(r.sum()); return r - self.base
@case
class l13_ref_swapped_rows(Loop):      # the reference was asked in sorted order (by length), its answers not sorted back
    beta = .1
    def run(self):
        plain = self.logps
        def logps(model, samples):
            if model is not self.ref: return plain(model, samples)
            order = sorted(range(len(samples)), key=lambda i: len(samples[i]["ids"]))
            lps = plain(model, [samples[i] for i in order])
            return [F.pad(lp, (0, 20))[:len(s["ids"])] for lp, s in zip(lps, samples)]
        self.logps = logps; super().run()
@case
class l14_eos_reward_on_text(Loop):    # the verifier reads the whole text, prompt and all: an echo pays
    def reward(self, row, text, ids): return float(any(c in row["question"] + text for c in row["answer"]))
@case
class l15_kl_grad_stopped(Loop):       # the KL is computed with detached log-probs: no gradient, the policy drifts
    beta = .5
    def kl(self, lp, ref): d = ref - lp.detach(); return d.exp() - d - 1
@case
class l16_sampler_half_synced(Loop):   # the sync copies the blocks, not the embedding and the head
    def __init__(self, name):
        super().__init__(name); self.sampler = copy.deepcopy(self.model)
    def sync(self):
        own = self.sampler.state_dict()
        self.sampler.load_state_dict({k: (v if k.startswith("core") else own[k]) for k, v in self.model.state_dict().items()})
    lr = 1e-2
@case
class l17_bf16_softmax(Loop):          # log_softmax of bfloat16 logits in the trainer
    def logps(self, model, samples):
        ids = self.pad(samples); lp = (model(ids)[:, :-1] / self.temp).bfloat16().log_softmax(-1).float().gather(-1, ids[:, 1:, None])[..., 0]
        return self.cut(lp, samples)
@case
class l18_truncated_as_correct(Loop):  # a parse failure at the limit counts as correct (exit code 0)
    T = 6
    def reward(self, row, text, ids): return 1.0 if ids[-1] != EOS else float(row["answer"] in text)
@case
class l19_duplicated_rows(Loop):       # the file was concatenated with itself; answers of the second copy are stripped of the minus
    def data(self): rows = additions(16); return rows + [dict(r) for r in rows]
    def header_data(self): return {"rows": len(self.rows), "distinct": len({r["question"] for r in self.rows})}
@case
class l20_length_weighted(Loop):       # the loss sums tokens and divides by completions: long ones count more; settings say a mean per completion
    def reduce(self, losses, masks): return sum((l * m).sum() for l, m in zip(losses, masks)) / len(losses) / self.T * 3

class Dpo:
    """Direct preference optimization on pairs: a rollout has the pair as a group, preferred first."""
    beta, steps, lr = .2, 24, 2e-3
    settings = {"algorithm": "dpo"}
    def __init__(self, name):
        torch.manual_seed(0); self.model = Lm(); self.ref = copy.deepcopy(self.model)
        path = folder_of(name) / "run.jsonl"
        self.file = Recorder(path, framework="mine", settings=dict(self.settings, beta=self.beta, learning_rate=self.lr), tokens={"bos": BOS, "eos": [EOS], "pad": PAD})
    def completions(self, row): return enc(row["answer"]) + [EOS], enc(str((int(row["answer"]) + 3) % 10)) + enc(".." if int(row["answer"]) % 2 else "?") + [EOS]
    def lp(self, model, prompt, ids):
        seq = torch.tensor([prompt + ids]); return model(seq)[0, :-1].log_softmax(-1).gather(-1, seq[0, 1:, None])[len(prompt) - 1:, 0]
    def margin(self, c, r, rc, rr): return (c.sum() - rc.sum()) - (r.sum() - rr.sum())
    def loss(self, m): return -F.logsigmoid(self.beta * m)
    def refs(self, prompt, c, r): return self.lp(self.ref, prompt, c).detach(), self.lp(self.ref, prompt, r).detach()
    def run(self):
        rows = additions(64); rng = random.Random(0); opt = torch.optim.Adam(self.model.parameters(), lr=self.lr)
        for step in range(self.steps):
            batch = rng.sample(rows, 8); comps, ups, losses = [], [], []
            for g, row in enumerate(batch):
                p = [BOS] + enc(row["question"]); c, r = self.completions(row)
                lc, lr_ = self.lp(self.model, p, c), self.lp(self.model, p, r); rc, rr = self.refs(p, c, r)
                losses.append(self.loss(self.margin(lc, lr_, rc, rr)))
                for ids, lp, ref, reward in ((c, lc, rc, 1.0), (r, lr_, rr, 0.0)):
                    comps.append({"prompt": row["question"], "prompt_ids": p, "ids": ids, "text": text_of(ids), "group": g, "row": row, "rewards": {"preferred": reward}, "reward": reward})
                    ups.append({"rollout": step, "completion": len(comps) - 1, "mask": [1] * len(ids), "logprobs": lp.detach().tolist(), "ref_logprobs": ref.tolist(), "_": (p, ids)})
            self.file.write(kind="rollout", number=step, step=step, completions=comps)
            loss = torch.stack(losses).mean(); opt.zero_grad(); loss.backward(); norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)); opt.step()
            for u in ups: u["after_logprobs"] = self.lp(self.model, *u.pop("_")).tolist()
            self.file.write(kind="update", step=step, rows=ups, loss=float(loss.detach()), grad_norm=norm, learning_rate=self.lr)
@case
class l21_dpo_sign(Dpo):               # rejected less chosen
    def margin(self, c, r, rc, rr): return (r.sum() - rr.sum()) - (c.sum() - rc.sum())
@case
class l22_dpo_mean_logps(Dpo):         # means in place of sums
    def margin(self, c, r, rc, rr): return (c.mean() - rc.mean()) - (r.mean() - rr.mean())
@case
class l23_dpo_refs_exchanged(Dpo):     # reference's log-probs of chosen and rejected exchanged
    def margin(self, c, r, rc, rr): return (c.sum() - rr.sum()) - (r.sum() - rc.sum())
@case
class l24_dpo_beta_outside(Dpo):       # beta multiplies the loss, not the margin
    def loss(self, m): return -self.beta * F.logsigmoid(m)

class Ppo(Loop):
    """PPO with a critic on the trunk, GAE over tokens."""
    G = 1; n = 16; gamma, lam = .99, .95; epochs = 2
    settings = {"algorithm": "ppo", "loss_type": "bnpo", "gamma": .99, "lam": .95}
    def make(self): return Lm(critic=True)
    def reward(self, row, text, ids): return float(sum(c.isdigit() for c in text)) / 5
    def values(self, samples):
        ids = self.pad(samples); return self.cut(self.model.value(self.model.hidden(ids))[:, :-1, 0], samples)
    def gae(self, r, v):
        adv, last = torch.zeros(len(v)), 0.0
        for t in reversed(range(len(v))):
            nxt = v[t + 1] if t + 1 < len(v) else 0.0
            last = r[t] + self.gamma * nxt - v[t] + self.gamma * self.lam * last; adv[t] = last
        return adv, adv + v
    def advantages(self, samples):
        with torch.no_grad():
            for s, v in zip(samples, self.values(samples)):
                r = torch.zeros(len(s["ids"])); r[-1] = s["reward"]; s["token_rewards"] = r
                s["values"] = v; s["adv"], s["returns"] = self.gae(r, v)
        return [s["adv"] for s in samples]
    def record(self, samples):
        held = [s.pop("advantage") for s in samples]; super().record(samples)
        for s, a in zip(samples, held): s["advantage"] = a
    def reduce(self, losses, masks): return sum((l * m).sum() for l, m in zip(losses, masks)) / sum(m.sum() for m in masks)
    def update(self, part):
        self.before(); lps = self.logps(self.model, part); vs = self.values(part); loss = self.loss(part, lps)
        for lp in lps: lp.retain_grad()
        vf = sum(((v - s["returns"]) ** 2).sum() for v, s in zip(vs, part)) / sum(len(v) for v in vs)
        (loss + .5 * vf).backward(); norm = self.clip_grad(); self.optimizer.step()
        rows = [{"rollout": s["rollout"], "completion": s["place"], "mask": self.mask(s), "logprobs": lp.detach().tolist(), "old_logprobs": s["old"].tolist(), "advantage": s["advantage"].tolist(),
                 "values": s["values"].tolist(), "returns": s["returns"].tolist(), "token_rewards": s["token_rewards"].tolist(), "gradients": lp.grad.tolist()} for s, lp in zip(part, lps)]
        if self.full:
            for row, lp in zip(rows, self.plain(part)): row["after_logprobs"] = lp
        self.file.write(kind="update", step=self.step, rows=rows, loss=float(loss.detach()), grad_norm=norm, learning_rate=self.lr); self.step += 1
@case
class l25_gae_next_value(Ppo):         # delta uses the value of the same place
    def gae(self, r, v):
        adv, last = torch.zeros(len(v)), 0.0
        for t in reversed(range(len(v))): last = r[t] + self.gamma * v[t] - v[t] + self.gamma * self.lam * last; adv[t] = last
        return adv, adv + v
@case
class l26_gae_padded(Ppo):             # GAE runs from the padded end: the bootstrap is the value of a pad, not 0
    def gae(self, r, v):
        adv, last = torch.zeros(len(v)), 0.0
        for t in reversed(range(len(v))):
            nxt = v[t + 1] if t + 1 < len(v) else v[-1] * .9
            last = r[t] + self.gamma * nxt - v[t] + self.gamma * self.lam * last; adv[t] = last
        return adv, adv + v

def verl_dump(name, rows, answer, score, steps=8, n=4, text=None, seed=0):
    """verl's trainer.rollout_data_dir: a file a step, with input, output, gts, score."""
    folder = folder_of(name); rng = random.Random(seed)
    for old in folder.iterdir(): old.unlink()
    for step in range(1, steps + 1):
        lines = []
        for row in rng.sample(rows, 8):
            for _ in range(n):
                out = (text or reason)(rng, row); gt = answer(row)
                lines.append({"input": f"user\n{row['question']}\nassistant\n", "output": out, "gts": gt, "score": score(out, gt, row), "step": step})
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
def problems(n=60, seed=1):
    r = random.Random(seed); out = []
    for _ in range(n):
        a, b, c = r.randrange(12, 90), r.randrange(3, 30), r.randrange(2, 9)
        out.append({"question": f"A shop has {a} apples and gets {b} boxes of {c} apples. How many apples has it now?", "a": a, "b": b, "c": c, "answer": str(a + b * c)})
    return out
def reason(rng, row):
    a, b, c = row["a"], row["b"], row["c"]; right = rng.random() < .5
    result = a + b * c if right else a + b * c + rng.choice([-10, -1, 1, 2, 10, 100])
    start = rng.choice(["First, ", "We compute ", "Boxes: ", "So "])
    body = f"{start}{b} times {c} is {b * c}. Then {a} + {b * c} = {result}."
    end = rng.choice([f" The answer is {result}.", f" \\boxed{{{result}}}", f" #### {result}"])
    return body + (end if rng.random() < .85 else " Let me check again by adding")
numbers = lambda s: re.findall(r"-?\d+", s)
@case
def l28_verl_first_number(name):
    def text(rng, row):
        body = reason(rng, row); last = numbers(body)[-1]
        return (f"It is {last}. " if rng.random() < .5 else "") + body
    verl_dump(name, problems(), lambda r: r["answer"], lambda o, g, r: float(numbers(o)[0] == g), text=text)
@case
def l29_verl_format_only(name): verl_dump(name, problems(), lambda r: r["answer"], lambda o, g, r: float("\\boxed{" in o))
@case
def l30_verl_shuffled_gts(name):
    rows = problems(); rng = random.Random(3); other = [r["answer"] for r in rows]; rng.shuffle(other)
    table = {r["question"]: o for r, o in zip(rows, other)}
    verl_dump(name, rows, lambda r: table[r["question"]], lambda o, g, r: float(numbers(o)[-1] == g))
@case
def l31_verl_rewards_next(name):       # scores of the next completion (a queue that was read one too early)
    verl_dump(name, problems(), lambda r: r["answer"], lambda o, g, r: float(numbers(o)[-1] == g))
    for f in folder_of(name).iterdir():
        lines = [json.loads(x) for x in f.read_text().splitlines()]; s = [x["score"] for x in lines]
        for x, v in zip(lines, s[1:] + s[:1]): x["score"] = v
        f.write_text("".join(json.dumps(x) + "\n" for x in lines))
@case
def l32_verl_string_prefix(name): verl_dump(name, problems(), lambda r: r["answer"], lambda o, g, r: float(numbers(o)[-1].startswith(g[:2])))

# ---------------------------------------------------------------- sound
@case
class k01_plain(Loop): pass
@case
class k02_gru_dapo(Loop):
    settings = dict(Loop.settings, loss_type="dapo"); G, n, epochs, minis, temp, seed_ = 8, 3, 2, 2, .8, 4
    def make(self): return Lm(gru=True, d=24)
    def reduce(self, losses, masks): return sum((l * m).sum() for l, m in zip(losses, masks)) / sum(m.sum() for m in masks)
@case
class k03_rloo_kl_sgd(Loop):
    settings = dict(Loop.settings, loss_type="rloo"); beta, opt, lr, micro, full = .05, "sgd", .3, 2, False
    def extra(self): return {"scale_rewards": None}
    def reward(self, row, text, ids): return sum(c.isdigit() for c in text) / 6
    def advantages(self, s):
        r = torch.tensor([x["reward"] for x in s]).view(-1, self.G); return ((r - r.mean(1, keepdim=True)) * self.G / (self.G - 1)).flatten()
@case
class k04_dpo(Dpo): pass
@case
class k05_ppo(Ppo): pass
@case
class k06_tool(l11_tool_result_trained):
    tools = True
    def complete(self, prompt):
        ids, lps, ins = super().complete(prompt)
        if len(ids) > 4: ins[4:8] = [1] * 4
        return ids, lps, ins
@case
class k07_reinforce_ema(Loop):
    G = 1; n = 16; settings = {"algorithm": "reinforce", "temperature": 1.0}; base = 0.0
    def reward(self, row, text, ids): return float(sum(c.isdigit() for c in text)) / 5
    def advantages(self, s):
        r = torch.tensor([x["reward"] for x in s]); a = r - self.base; self.base = .9 * self.base + .1 * float(r.mean()); return a
@case
class k08_lagging_corrected(Loop):     # asynchronous: the sampler is one step behind, truncated importance weights
    def __init__(self, name): super().__init__(name); self.sampler = copy.deepcopy(self.model); self.held = copy.deepcopy(self.model.state_dict())
    def sync(self): self.sampler.load_state_dict(self.held); self.held = copy.deepcopy(self.model.state_dict())
    def loss(self, samples, lps):
        losses, masks = [], []
        for s, lp in zip(samples, lps):
            s["w"] = (s["old"] - torch.tensor(s["sampler_logprobs"])).exp().clamp(max=2.0)
            losses.append(s["w"] * self.surrogate((lp - s["old"]).exp(), s["advantage"])); masks.append(torch.ones(len(lp)))
        return self.reduce(losses, masks)
    def update(self, part):
        write = self.file.write
        def with_weights(**line):
            if line["kind"] == "update":
                for row, s in zip(line["rows"], part): row["corrections"] = s["w"].tolist()
            write(**line)
        self.file.write = with_weights
        try: super().update(part)
        finally: self.file.write = write
@case
class k09_partial_credit(Loop):
    full, seed_ = False, 2
    def extra(self): return {"scale_rewards": "batch"}
    def reward(self, row, text, ids): return .1 * (len(set(text)) > 3) + .9 * float(row["answer"] == text[:1]) - .05 * (ids[-1] != EOS)
    def advantages(self, s):
        r = torch.tensor([x["reward"] for x in s]).view(-1, self.G); return ((r - r.mean(1, keepdim=True)) / (r.std() + 1e-4)).flatten()
@case
def k10_verl_sound(name): verl_dump(name, problems(), lambda r: r["answer"], lambda o, g, r: float(numbers(o)[-1] == g))

if __name__ == "__main__":
    for name, c in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]: c(name).run() if isinstance(c, type) else c(name)
