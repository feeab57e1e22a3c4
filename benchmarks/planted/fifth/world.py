"""A tiny world: sums of two digits, a small transformer, a sampler, a loop whose parts are methods."""
import contextlib, copy, math, random, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.nn as nn, torch.nn.functional as F
from covey.audit.writers.recorder import Recorder, numbers, plain_logprobs
torch.set_num_threads(1)
HERE = Path(__file__).parent
PAD, BOS, EOS = 0, 1, 2
CH = "0123456789+=? []"
V = 3 + len(CH)
enc = lambda s: [3 + CH.index(c) for c in s]
dec = lambda ids: "".join(CH[i - 3] for i in ids if i >= 3)

class Block(nn.Module):
    def __init__(s, d, h, p):
        super().__init__()
        s.n1, s.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        s.qkv, s.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        s.up, s.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        s.h, s.drop = h, nn.Dropout(p)
    def forward(s, x, m):
        B, T, d = x.shape
        q, k, v = s.qkv(s.n1(x)).view(B, T, 3, s.h, d // s.h).permute(2, 0, 3, 1, 4)
        x = x + s.drop(s.o(F.scaled_dot_product_attention(q, k, v, attn_mask=m).transpose(1, 2).reshape(B, T, d)))
        return x + s.drop(s.down(F.gelu(s.up(s.n2(x)))))

class Tiny(nn.Module):
    def __init__(s, d=48, layers=2, p=0.0, ctx=96):
        super().__init__()
        s.emb, s.pos = nn.Embedding(V, d), nn.Embedding(ctx, d)
        s.blocks = nn.ModuleList(Block(d, 2, p) for _ in range(layers))
        s.norm, s.head, s.value = nn.LayerNorm(d), nn.Linear(d, V), nn.Linear(d, 1)
    def hidden(s, input_ids, attention_mask=None, position_ids=None, segments=None):
        B, T = input_ids.shape
        m = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(B, 1, T, T)
        if attention_mask is not None:
            m = (m & attention_mask.bool()[:, None, None, :]) | torch.eye(T, dtype=torch.bool)
        if segments is not None:
            m = m & (segments[:, None, :, None] == segments[:, None, None, :])
        if position_ids is None:
            position_ids = torch.arange(T)[None].expand(B, T)
        x = s.emb(input_ids) + s.pos(position_ids)
        for b in s.blocks:
            x = b(x, m)
        return s.norm(x)
    def forward(s, input_ids, attention_mask=None, position_ids=None, segments=None, **kw):
        return SimpleNamespace(logits=s.head(s.hidden(input_ids, attention_mask, position_ids, segments)))

def pretrained(p=0.0):
    path = HERE / "tiny.pt"
    m = Tiny(p=p)
    if not path.exists():
        torch.manual_seed(0); rng = random.Random(0); m = Tiny()
        opt = torch.optim.AdamW(m.parameters(), 2e-3)
        for step in range(500):
            seqs = []
            for _ in range(64):
                a, b = rng.randrange(10), rng.randrange(10)
                n = rng.choice([2, 3])
                pr = f"{a}+{b}=" if n == 2 else f"{a}+{b}+{rng.randrange(10)}="
                ans = str(sum(map(int, pr[:-1].split("+"))) % 10)
                if rng.random() < 0.35: ans = rng.choice("0123456789")
                fill = "".join(rng.choice("0123456789 ") for _ in range(rng.randrange(6)))
                tool = rng.choice(["", "", "?"])
                seqs.append([BOS] + enc(pr) + enc(fill + tool + ans) + [EOS])
            L = max(map(len, seqs)); x = torch.tensor([q + [PAD] * (L - len(q)) for q in seqs])
            lo = F.cross_entropy(m(x).logits[:, :-1].reshape(-1, V), x[:, 1:].reshape(-1), ignore_index=PAD)
            opt.zero_grad(); lo.backward(); opt.step()
        torch.save(m.state_dict(), path)
    m.load_state_dict(torch.load(path))
    return m

class S(SimpleNamespace): pass

class Loop:
    steps, prompts, group, lr, temperature, max_new, epochs, eps, eps_high, beta = 8, 4, 4, 5e-4, 1.0, 8, 1, 0.2, None, 0.0
    minibatches, dropout, seed, digits, first_step = 1, 0.0, 1, (2, 3), 0
    level, loss_type, scale, looks, model_looks = "token", "dapo", "group", True, True
    extra = {}
    framework = "mine"
    def __init__(s, name):
        s.name = name; torch.manual_seed(s.seed); s.rng = random.Random(s.seed)
        s.model = pretrained(s.dropout); s.build()
        s.opt = torch.optim.AdamW(s.parameters(), s.lr, weight_decay=0.0)
        folder = HERE / "runs" / name; folder.mkdir(parents=True, exist_ok=True)
        s.file = Recorder(folder / "run.jsonl", framework=s.framework, settings=s.settings(), tokens={"bos": BOS, "eos": [EOS], "pad": PAD})
    def build(s): pass
    def parameters(s): return [p for p in s.model.parameters() if p.requires_grad]
    def settings(s):
        d = dict(temperature=s.temperature, num_generations=s.group, epsilon=s.eps, beta=s.beta, loss_type=s.loss_type,
                 scale_rewards=s.scale, num_iterations=s.epochs, max_completion_length=s.max_new, learning_rate=s.lr,
                 importance_sampling_level=s.level, max_grad_norm=1.0)
        if s.eps_high: d["epsilon_high"] = s.eps_high
        return {**d, **s.extra}
    # sampling
    def problem(s):
        n = s.rng.choice(s.digits); t = "+".join(str(s.rng.randrange(10)) for _ in range(n)) + "="
        return {"prompt": t, "answer": str(sum(map(int, t[:-1].split("+"))) % 10)}
    def sampler(s): return s.model
    @torch.no_grad()
    def generate(s, samples, limit=None):
        m = s.sampler(); was = m.training; m.eval()
        live = [True] * len(samples); limit = limit or s.max_new
        for _ in range(limit):
            if not any(live): break
            seqs = [x.prompt_ids + x.ids for x in samples]; L = max(map(len, seqs))
            ids = torch.tensor([[PAD] * (L - len(q)) + q for q in seqs]); att = torch.tensor([[0] * (L - len(q)) + [1] * len(q) for q in seqs])
            pos = (att.cumsum(1) - 1).clamp(min=0)
            lp = (m(ids, att, pos).logits[:, -1] / s.temperature).log_softmax(-1)
            nxt = torch.multinomial(lp.exp(), 1)[:, 0]
            for i, x in enumerate(samples):
                if live[i]:
                    t = int(nxt[i]); x.ids.append(t); x.sampler.append(float(lp[i, t])); x.inserted.append(0)
                    if t == EOS: live[i] = False
        m.train(was)
    def size(s, g): return s.group
    def sample(s):
        out = []
        for g in range(s.prompts):
            row = s.problem()
            out += [S(prompt_ids=[BOS] + enc(row["prompt"]), row=row, group=g, ids=[], sampler=[], inserted=[]) for _ in range(s.size(g))]
        s.generate(out); return out
    def reward(s, x):
        t = dec(x.ids); return float(x.ids[-1] == EOS and t.strip()[-1:] == x.row["answer"])
    def finish(s, x): x.text = dec(x.ids); x.reward = s.reward(x); x.rewards = {"right": x.reward}
    # the trainer's side
    def logps(s, m, xs, entropy=False):
        seqs = [x.prompt_ids + x.ids for x in xs]; L = max(map(len, seqs))
        ids = torch.tensor([q + [PAD] * (L - len(q)) for q in seqs])
        lp = (m(ids).logits[:, :-1] / s.temperature).log_softmax(-1); tok = lp.gather(2, ids[:, 1:, None])[..., 0]
        H = -(lp.exp() * lp).sum(-1)
        cut = lambda z: [z[i, len(x.prompt_ids) - 1 : len(x.prompt_ids) - 1 + len(x.ids)] for i, x in enumerate(xs)]
        return (cut(tok), cut(H)) if entropy else cut(tok)
    def mask(s, x): return torch.tensor([1.0 - i for i in x.inserted])
    def groups(s, xs):
        d = {}
        for x in xs: d.setdefault(x.group, []).append(x)
        return d.values()
    def advantages(s, xs):
        for g in s.groups(xs):
            r = torch.tensor([x.reward for x in g]); a = (r - r.mean()) / (r.std() + 1e-4)
            for x, v in zip(g, a): x.adv = float(v)
    def old(s, xs):
        with torch.no_grad(): return s.logps(s.model, xs)
    def prepare(s, xs): return xs
    def token_loss(s, x, lp):
        a = x.adv if torch.is_tensor(x.adv) else torch.full_like(lp, x.adv)
        ratio = (lp - x.old).exp()
        if s.level == "sequence": ratio = s.sequence_ratio(x, lp).expand_as(lp)
        l = -torch.min(ratio * a, ratio.clamp(1 - s.eps, 1 + (s.eps_high or s.eps)) * a)
        if s.beta and s.level != "kl_in_reward": l = l + s.beta * ((x.ref - lp).exp() - (x.ref - lp) - 1)
        return l
    def sequence_ratio(s, x, lp): return (((lp - x.old) * x.mask).sum() / x.mask.sum()).exp()
    def reduce(s, xs, ls):
        m = [x.mask for x in xs]
        if s.loss_type == "grpo": return torch.stack([(l * k).sum() / k.sum().clamp(min=1) for l, k in zip(ls, m)]).mean()
        if s.loss_type == "dr_grpo": return sum((l * k).sum() for l, k in zip(ls, m)) / (len(xs) * s.max_new)
        return sum((l * k).sum() for l, k in zip(ls, m)) / sum(k.sum() for k in m)
    def extra_loss(s, xs, lps, Hs): return 0.0
    def optimize(s, xs):
        lps, Hs = s.logps(s.model, xs, True)
        loss = s.reduce(xs, [s.token_loss(x, lp) for x, lp in zip(xs, lps)]) + s.extra_loss(xs, lps, Hs)
        s.opt.zero_grad(); loss.backward()
        gn = nn.utils.clip_grad_norm_(s.parameters(), 1.0); s.opt.step()
        return [l.detach() for l in lps], float(loss), float(gn), sum(float(h.mean()) for h in Hs) / len(Hs)
    def schedule(s, step): pass
    def plain(s, x): return plain_logprobs(s.model, x.prompt_ids, x.ids, [s.temperature], contextlib.nullcontext())[0]
    def after_step(s, step): pass
    def metrics(s, xs, ent): return {"entropy": ent}
    def sample_fields(s, x): return {}
    def row_fields(s, x): return {}
    def completions(s, xs):
        out = []
        for i, x in enumerate(xs):
            c = dict(prompt=x.row["prompt"], prompt_ids=x.prompt_ids, ids=x.ids, text=x.text, group=x.group, row=x.row, rewards=x.rewards, reward=x.reward)
            if hasattr(x, "adv") and not torch.is_tensor(x.adv): c["advantage"] = x.adv
            if s.looks: c["sampler_logprobs"] = [round(v, 6) for v in x.sampler]
            if any(x.inserted): c["inserted"] = x.inserted
            if s.model_looks and i < 8: c["model_logprobs"] = s.plain(x)
            out.append({**c, **s.sample_fields(x)})
        return out
    def run(s):
        u = s.first_step; s.number = 0
        s.file.weights_changed(s.parameters())
        for it in range(s.steps):
            s.step_now = it
            s.schedule(it); s.model.train()
            xs = s.sample()
            for x in xs: s.finish(x)
            s.advantages(xs); all_xs = xs
            cs = s.completions(all_xs)
            for i, x in enumerate(all_xs): x.place = i
            s.file.write(kind="rollout", number=s.number, step=u, completions=cs)
            xs = s.prepare(xs)
            for x in xs: x.mask = s.mask(x)
            for x, o in zip(xs, s.old(xs)): x.old = o
            if getattr(s, "ref", None) is not None:
                with torch.no_grad():
                    for x, o in zip(xs, s.logps(s.ref, xs)): x.ref = o
            s.shape(xs)
            for e in range(s.epochs):
                order = list(range(len(xs)))
                if s.minibatches > 1: s.rng.shuffle(order)
                k = math.ceil(len(order) / s.minibatches)
                for b in range(0, len(order), k):
                    mb = [xs[i] for i in order[b : b + k]]
                    lps, loss, gn, ent = s.optimize(mb)
                    rows = []
                    for x, lp in zip(mb, lps):
                        r = dict(rollout=s.number, completion=x.place, mask=[int(v) for v in x.mask], logprobs=numbers(lp), old_logprobs=numbers(x.old),
                                 advantage=numbers(x.adv) if torch.is_tensor(x.adv) else x.adv)
                        if hasattr(x, "ref"): r["ref_logprobs"] = numbers(x.ref)
                        if s.model_looks and x.place < 8: r["after_logprobs"] = s.plain(x)
                        rows.append({**r, **s.row_fields(x)})
                    s.file.write(kind="update", step=u, rows=rows, loss=loss, grad_norm=gn, learning_rate=s.opt.param_groups[0]["lr"],
                                 weights_changed=s.file.weights_changed(s.parameters()), metrics=s.metrics(mb, ent))
                    u += 1
            s.number += 1
            s.after_step(it)
    def shape(s, xs): pass


def run_loops(loops):
    """Run the loops whose numbers are arguments, or all; one that fails keeps the others from nothing."""
    for name, loop in loops.items():
        if len(sys.argv) > 1 and name[1:] not in sys.argv[1:]: continue
        try: loop(name).run(); print(name, "ok", flush=True)
        except Exception: import traceback; traceback.print_exc()
