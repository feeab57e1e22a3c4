"""A tiny hand-made GRPO/PPO loop that writes covey's record or prime-rl's files; `o` holds what is planted."""
import json, math, random, sys
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F

torch.set_num_threads(1)
PAD, BOS, EOS, D0, PLUS, EQ, FILL, CALL, RES, END = 0, 1, 2, 3, 13, 14, 15, 20, 21, 22
V, MAXN = 23, 8
HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.e = nn.Embedding(V, 32); self.pos = nn.Embedding(40, 32)
        layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=p, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer(), layer()])
        self.h = nn.Linear(32, V); self.v = nn.Linear(32, 1)

    def forward(self, x, value=False):
        t = x.shape[1]
        z = self.e(x) + self.pos(torch.arange(t))
        m = torch.full((t, t), float("-inf")).triu(1)
        for l in self.layers:
            z = l(z, src_mask=m)
        return (self.h(z), self.v(z.detach()).squeeze(-1)) if value else self.h(z)


def base(accuracy=0.5, seed=0, p=0.0, steps=900):
    f = HERE / f"base_{accuracy}_{seed}.pt"
    m = Net(p)
    if f.exists():
        m.load_state_dict(torch.load(f)); m.eval(); return m
    torch.manual_seed(seed); random.seed(seed)
    m = Net(0.0)
    opt = torch.optim.Adam(m.parameters(), 3e-3)
    for _ in range(steps):
        rows = []
        for _ in range(64):
            a, b = random.randrange(10), random.randrange(10)
            s = (max(a, b) + 1) % 10 if random.random() < accuracy else random.randrange(10)
            rows.append([BOS, D0 + a, PLUS, D0 + b, EQ] + [FILL + random.randrange(5) for _ in range(random.randrange(4))] + [D0 + s, EOS])
        n = max(map(len, rows))
        x = torch.tensor([r + [PAD] * (n - len(r)) for r in rows])
        loss = F.cross_entropy(m(x)[:, :-1].reshape(-1, V), x[:, 1:].reshape(-1), ignore_index=PAD)
        opt.zero_grad(); loss.backward(); opt.step()
    torch.save(m.state_dict(), f)
    return base(accuracy, seed, p)


@torch.no_grad()
def sample(m, prompts, temperature=1.0, top_p=1.0, generator=None, tools=False, maxn=MAXN):
    m.eval()
    x = torch.tensor(prompts); n = len(prompts)
    ids = [[] for _ in range(n)]; lps = [[] for _ in range(n)]; ins = [[] for _ in range(n)]; done = [False] * n
    forced = [[] for _ in range(n)]
    for k in range(maxn):
        lp = F.log_softmax(m(x)[:, -1] / temperature, -1)
        if top_p < 1:
            s, i = lp.exp().sort(descending=True)
            keep = (s.cumsum(-1) - s) < top_p
            lp = torch.full_like(lp, float("-inf")).scatter(1, i, torch.where(keep, s.log(), torch.tensor(float("-inf"))))
            lp = F.log_softmax(lp, -1)
        t = torch.multinomial(lp.exp(), 1, generator=generator)[:, 0]
        new = []
        for j in range(n):
            if done[j]:
                new.append(PAD); continue
            if forced[j]:
                c = forced[j].pop(0); ids[j].append(c); lps[j].append(None); ins[j].append(1)
            else:
                c = int(t[j]); ids[j].append(c); lps[j].append(float(lp[j, c])); ins[j].append(0)
                if tools and c == FILL and not any(ins[j]):
                    forced[j] = [RES, D0 + (max(prompts[j][1], prompts[j][3]) - D0 + 1) % 10, END]
                if c == EOS:
                    done[j] = True
            new.append(c)
        x = torch.cat([x, torch.tensor(new)[:, None]], 1)
        if all(done):
            break
    return ids, lps, ins


def logps(m, prompts, ids, temperature=1.0, train=False, value=False):
    n = max(map(len, ids))
    x = torch.tensor([p + i + [PAD] * (n - len(i)) for p, i in zip(prompts, ids)])
    m.train(train)
    out = m(x, value)
    z = out[0] if value else out
    P = len(prompts[0])
    l = F.log_softmax(z / temperature, -1)
    tok = l[:, P - 1:-1].gather(2, x[:, P:, None])[..., 0]
    ent = -(l.exp() * l)[:, P - 1:-1].sum(-1)
    return (tok, ent, out[1][:, P - 1:-1]) if value else (tok, ent)


def cut(t, ids, null=None):
    r = [[round(float(v), 7) for v in row[:len(i)]] for row, i in zip(t, ids)]
    return r


NAMES = {PAD: "<pad>", BOS: "<s>", EOS: "</s>", PLUS: " max ", EQ: " next=", CALL: "<call>", RES: "<res>", END: "</res>"}
def text(ids):
    return "".join(NAMES.get(i) or (str(i - D0) if D0 <= i < D0 + 10 else "abcde"[i - FILL]) for i in ids)


def train(name, steps=10, G=8, B=8, lr=3e-4, accuracy=0.5, seed=1, temperature=1.0, prime=None, fields="full", **o):
    random.seed(seed); torch.manual_seed(seed)
    m = base(accuracy, p=o.get("dropout", 0.0)); sampler = base(accuracy)
    ref = base(accuracy, seed=7) if o.get("other_ref") else base(accuracy)
    opt = torch.optim.AdamW(m.parameters(), lr)
    if o.get("untrained"):
        torch.manual_seed(5); m = Net(); sampler = Net(); ref = Net()
        with torch.no_grad(): m.h.bias[D0:D0 + 10] -= 40
        ref.load_state_dict(m.state_dict()); opt = torch.optim.AdamW(m.parameters(), lr)
    eps_lo, eps_hi = o.get("eps", (0.2, 0.2)); beta = o.get("beta", 0.0)
    settings = {"temperature": temperature, "top_p": 1.0, "num_generations": G, "epsilon": eps_lo, "epsilon_high": eps_hi,
                "beta": beta, "learning_rate": lr, "num_iterations": o.get("iterations", 1), "dtype": "float32",
                "max_completion_length": MAXN, **o.get("settings", {})}
    lines = [{"format": "covey-audit", "version": 2, "framework": o.get("framework", "mine"), "settings": settings,
              "tokens": {"bos": BOS, "eos": [EOS], "pad": PAD}}]
    queue, old_weights, update, prev, ema = [], [], 0, None, None
    gen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        old_weights.append({k: v.clone() for k, v in m.state_dict().items()})
        lag = o.get("lag", 0)
        sampler.load_state_dict(old_weights[max(0, step - lag)])
        if o.get("constant_seed"): gen.manual_seed(0)
        pairs = [(random.randrange(10), random.randrange(10)) for _ in range(B * (2 if o.get("dapo") else 1))]
        if o.get("easy_dead") and step % 3 == 2: pairs = [o["easy_dead"]] * len(pairs)
        prompts = [[BOS, D0 + a, PLUS, D0 + b, EQ] for a, b in pairs for _ in range(G)]
        ids, lps, ins = sample(sampler, prompts, temperature, o.get("top_p", 1.0), gen, o.get("tools"))
        right = []
        for p, i, q in zip(prompts, ids, ins):
            want = D0 + (max(p[1], p[3]) - D0 + 1) % 10
            body = i[:-1] if i[-1] == EOS else i
            right.append(1.0 if i[-1] == EOS and body and body[-1] == want and not (q[len(body) - 1]) else 0.0)
        if o.get("signed"): right = [2 * r - 1 for r in right]
        if o.get("noise_dead"): pass
        rewards = {"correct": right}
        if o.get("format"): rewards["format"] = [(-1.0 if len(i) > 5 else 0.2) for i in ids]
        if o.get("overlong"): rewards["overlong"] = [min(0.0, (5 - len(i)) / 3) for i in ids]
        R = torch.tensor([sum(v) for v in zip(*rewards.values())])
        if o.get("clip01"): R = R.clamp(0, 1)
        used = R
        if o.get("prev_reward"):
            used = prev if prev is not None else R
            prev = R
        g = used.view(-1, G); Gr = R.view(-1, G)
        std = g.std(1, keepdim=True)
        A = (g - g.mean(1, keepdim=True))
        kind = o.get("adv", "grpo")
        if kind == "grpo": A = A / (std + 1e-4)
        if kind == "rloo": A = A * G / (G - 1)
        if kind == "ema":
            ema = float(R.mean()) if ema is None else ema
            A = g - ema; ema = 0.9 * ema + 0.1 * float(R.mean())
        A = A.flatten()
        if o.get("drop_negative"): A = A.clamp(min=0)
        with torch.no_grad():
            mlp, _ = logps(sampler, prompts, ids, temperature); m1, _ = logps(sampler, prompts, ids, 1.0)
        N = len(ids)
        L = max(map(len, ids))
        mask = torch.tensor([[1.0 - q for q in qq] + [0.0] * (L - len(qq)) for qq in ins])
        comps = [{"prompt": text(p), "prompt_ids": p, "text": text(i), "ids": i, "group": k // G,
                  "row": {"question": text(p[1:]), "answer": str((max(p[1], p[3]) - D0 + 1) % 10)},
                  "rewards": {n: v[k] for n, v in rewards.items()}, "reward": float(R[k]), "advantage": float(A[k]),
                  "sampler_logprobs": lps[k], "model_logprobs": cut(mlp, ids)[k], "model_logprobs_at_1": cut(m1, ids)[k]}
                 for k, (p, i) in enumerate(zip(prompts, ids))]
        if o.get("tools"):
            for c, q in zip(comps, ins): c["inserted"] = q
        lines.append({"kind": "rollout", "number": step, "step": update, "completions": comps})
        chosen = list(range(N))
        if o.get("dapo"):
            good = [k for k in range(N // G) if Gr[k].max() > Gr[k].min()][:B]
            chosen = [k * G + j for k in good for j in range(G)]
            if not chosen: continue
        with torch.no_grad():
            old, _ = logps(m, prompts, ids, temperature, train=o.get("old_dropout", False))
            reflp, _ = logps(ref, prompts, ids, temperature)
        samp = torch.tensor([[v if v is not None else 0.0 for v in r] + [0.0] * (L - len(r)) for r in lps])
        corr = None
        if o.get("correct"): corr = (old - samp).clamp(max=20).exp().clamp(max=2.0) * mask
        minis = o.get("minis", 1)
        per = len(chosen) // minis
        for it in range(o.get("iterations", 1)):
            if o.get("iterations", 1) * minis > 1 and o.get("shuffle", True): random.shuffle(chosen)
            for mb in range(minis):
                rows = chosen[mb * per:(mb + 1) * per]
                P_, I_ = [prompts[r] for r in rows], [ids[r] for r in rows]
                lp, ent = logps(m, P_, I_, temperature, train=bool(o.get("dropout")))
                w = lp.shape[1]
                k, od, a, rl = mask[rows][:, :w], old[rows][:, :w], A[rows][:, None], reflp[rows][:, :w]
                if o.get("old_after"):
                    pass
                ratio_log = lp - od
                if o.get("level") == "sequence":
                    sl = (ratio_log * k).sum(1, keepdim=True) / k.sum(1, keepdim=True)
                    ratio_log = sl if o.get("gspo_plain") else sl.detach() + lp - lp.detach()
                    ratio_log = ratio_log.expand_as(lp)
                ratio = ratio_log.exp()
                pg = -torch.min(ratio * a, ratio.clamp(1 - eps_lo, 1 + eps_hi) * a)
                if corr is not None: pg = pg * corr[rows][:, :w]
                kl = (rl - lp).exp() - (rl - lp) - 1
                tok = pg + beta * kl
                lt = settings.get("loss_type", "dapo")
                if lt == "grpo": loss = ((tok * k).sum(1) / k.sum(1)).mean()
                elif lt == "dr_grpo": loss = (tok * k).sum() / (len(rows) * MAXN)
                else: loss = (tok * k).sum() / k.sum()
                H = (ent * k).sum() / k.sum()
                if o.get("entropy"): loss = loss + o["entropy"] * H
                before = {n: v.clone() for n, v in m.state_dict().items()}
                if not o.get("no_zero_grad"): opt.zero_grad()
                loss.backward()
                gn = float(nn.utils.clip_grad_norm_(m.parameters(), o.get("clip", 1.0)))
                opt.step()
                changed = sum(int((before[n] != v).sum()) for n, v in m.state_dict().items()) / sum(v.numel() for v in before.values())
                recorded_old = od
                with torch.no_grad():
                    after, _ = logps(m, P_, I_, temperature)
                if o.get("old_after"):  # the "old" policy is read after the first pass moved the weights
                    recorded_old = after
                out = []
                for j, r in enumerate(rows):
                    T = len(ids[r])
                    row = {"rollout": step, "completion": r, "mask": [int(v) for v in k[j][:T].tolist()],
                           "logprobs": cut(lp, I_)[j], "old_logprobs": cut(recorded_old, I_)[j], "advantage": float(A[r])}
                    if beta: row["ref_logprobs"] = cut(rl, I_)[j]; row["kl"] = cut(kl, I_)[j]
                    if corr is not None: row["corrections"] = [round(float(v), 7) for v in corr[r][:T]]
                    if update < 3: row["after_logprobs"] = cut(after, I_)[j]
                    out.append(row)
                if o.get("old_after"):
                    lpo = recorded_old; rr = (lp - lpo).exp()
                    loss = ((-torch.min(rr * a, rr.clamp(1 - eps_lo, 1 + eps_hi) * a)) * k).sum() / k.sum()
                met = {"entropy": float(H), "reward": float(R.mean()), "completions/mean_length": sum(map(len, ids)) / N}
                if o.get("entropy"): met["policy_loss"] = float(loss - o["entropy"] * H)
                lines.append({"kind": "update", "step": update, "rows": out, "loss": float(loss), "grad_norm": gn,
                              "learning_rate": lr, "weights_changed": changed, "metrics": met})
                update += 1
    f = HERE / "runs" / name; f.mkdir(parents=True, exist_ok=True)
    if fields == "few":
        for l in lines:
            for c in l.get("completions", []):
                for k in list(c):
                    if k not in ("prompt", "text", "group", "reward", "advantage", "ids"): del c[k]
            if l.get("kind") == "update":
                l["rows"] = [{k: r[k] for k in ("rollout", "completion", "mask")} for r in l["rows"]]
                for k in ("weights_changed",): l.pop(k, None)
    if prime:
        write_prime(f, lines, o)
    else:
        (f / "run.jsonl").write_text("".join(json.dumps(l) + "\n" for l in lines))
    first = [l for l in lines if l.get("kind") == "update"]
    print(name, "reward", [round(u["metrics"]["reward"], 2) for u in first][:: max(1, len(first) // 6)], "len", round(first[-1]["metrics"]["completions/mean_length"], 1))


def write_prime(f, lines, o):
    rolls = [l for l in lines if l.get("kind") == "rollout"]; ups = {l["step"]: l for l in lines if l.get("kind") == "update"}
    mets = []
    for r in rolls:
        s = r["step"]; u = ups[s]; d = f / "rollouts" / f"step_{s}" / "train" / "effective"; d.mkdir(parents=True, exist_ok=True)
        e = f / "token_exports" / f"step_{s}"; e.mkdir(parents=True, exist_ok=True)
        with open(d / "traces.jsonl", "w") as h:
            for k, c in enumerate(r["completions"]):
                P = c["prompt_ids"]
                lp = [v for v in c["sampler_logprobs"]]
                task = {"type": "SumTask", "data": {"idx": c["group"], "question": c["row"]["question"], "answer": c["row"]["answer"]}}
                h.write(json.dumps({"id": f"{s}-{k}", "env": {"id": "sums", "name": "sums"}, "task": task, "group": {"id": f"g{s}-{c['group']}"},
                    "run": {"type": "train", "id": "r", "work": {"type": "train", "step": s, "policy": {"start": max(0, s - o.get("lag", 0)), "end": max(0, s - o.get("lag", 0))}}},
                    "ok": True, "errors": [], "traces": [{"version": 1, "id": f"t{s}-{k}", "task": task, "agent": {"name": "agent", "trainable": True, "config": {}},
                        "nodes": [{"message": {"role": "user", "content": c["row"]["question"]}, "sampled": False, "token_ids": P, "mask": [False] * len(P), "logprobs": []},
                                  {"parent": 0, "message": {"role": "assistant", "content": c["text"].replace("</s>", "")}, "sampled": True, "token_ids": c["ids"], "mask": [True] * len(c["ids"]), "logprobs": lp,
                                   "advantages": [c["advantage"]] * len(lp)}],
                        "calls": [{"node": 1, "finish_reason": "stop" if c["ids"][-1] == EOS else "length"}],
                        "rewards": {n: {"score": v, "weight": 1.0} for n, v in c["rewards"].items()}, "metrics": {}, "is_completed": True, "ok": True, "errors": []}]}) + "\n")
        with open(e / "rank_0.jsonl", "w") as h:
            for q, row in enumerate(u["rows"]):
                c = r["completions"][row["completion"]]; P = c["prompt_ids"]; n = len(P)
                z = [0.0] * n; T = len(c["ids"])
                tl = row["logprobs"]; il = c["sampler_logprobs"]; lr_ = [a - b for a, b in zip(tl, il)]
                h.write(json.dumps({"schema_version": 1, "step": s, "rank": 0, "micro_step": 0, "micro_sequence_idx": q, "export_sequence_idx": q, "env_name": "sums",
                    "token_ids": P + c["ids"], "position_ids": list(range(n + T)), "loss_mask": [False] * n + [True] * T, "advantages": [row["advantage"]] * (n + T),
                    "inference_logprobs": z + il, "trainer_logprobs": [-1.0] * n + tl, "entropy": [1.0] * (n + T), "mismatch_kl": [0.0] * n + [math.exp(v) - v - 1 for v in lr_],
                    "log_importance_ratio": z + lr_, "importance_ratio": [1.0] * n + [math.exp(v) for v in lr_], "prob_delta": z + [math.exp(a) - math.exp(b) for a, b in zip(tl, il)],
                    "is_masked": [False] * (n + T), "is_masked_high": [False] * (n + T), "is_masked_low": [False] * (n + T),
                    "rl_weights": [None] * (n + T), "ce_weights": [None] * (n + T), "ref_kl_weights": [None] * (n + T)}) + "\n")
        (e / "STABLE").touch()
        mets.append({"step": s, "time": 0.0, "reward/mean": u["metrics"]["reward"], "reward/all/mean": u["metrics"]["reward"]})
        mets.append({"step": s, "time": 0.0, "optim/grad_norm": u["grad_norm"], "optim/lr": u["learning_rate"], "loss/mean": u["loss"], "entropy/all/mean": u["metrics"]["entropy"]})
    (f / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in mets))
