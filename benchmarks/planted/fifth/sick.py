"""Loops in PyTorch with one mistake each, which the docstring of a class says."""
from world import *

class Ppo(Loop):
    """PPO with a value head; GAE."""
    loss_type, lam, epochs, minibatches, model_looks = "dapo", 0.95, 2, 2, True
    def settings(s): return {**super().settings(), "gamma": 1.0, "lam": s.lam, "scale_rewards": "none"}
    def values(s, xs, behind=0):
        seqs = [x.prompt_ids + x.ids for x in xs]; L = max(map(len, seqs)) + behind
        ids = torch.tensor([q + [PAD] * (L - len(q)) for q in seqs])
        v = s.model.value(s.model.hidden(ids))[..., 0]
        return [v[i, len(x.prompt_ids) - 1 : len(x.prompt_ids) - 1 + len(x.ids) + behind] for i, x in enumerate(xs)]
    def last(s, v): return 0.0
    def whiten(s, xs):
        al = torch.cat([x.adv for x in xs])
        for x in xs: x.adv = (x.adv - al.mean()) / (al.std() + 1e-8)
    def advantages(s, xs): pass
    def shape(s, xs):
        with torch.no_grad(): vs = s.values(xs, 1)
        for x, v in zip(xs, vs):
            T = len(x.ids); r = s.token_reward(x); a, run = torch.zeros(T), 0.0
            x.tr = r; x.values = v[:T]
            for t in reversed(range(T)):
                nv = v[t + 1] if t + 1 < T else s.last(v[t + 1])
                run = r[t] + nv - v[t] + s.lam * run; a[t] = run
            x.adv = a
        s.returns(xs)
    def token_reward(s, x):
        r = torch.zeros(len(x.ids)); r[-1] = x.reward; return r
    def returns(s, xs):
        for x in xs: x.ret = x.adv + x.values
        s.whiten(xs)
    def extra_loss(s, xs, lps, Hs):
        return 0.1 * sum(((v - x.ret) ** 2).mean() for v, x in zip(s.values(xs), xs)) / len(xs)
    def row_fields(s, x): return dict(values=numbers(x.values), returns=numbers(x.ret), token_rewards=numbers(x.tr), token_scores=numbers(s.scores(x)))
    def scores(s, x): return x.tr

class S01(Ppo):
    "GAE bootstraps from the value at the padding behind the end token"
    def last(s, v): return v

class S02(Loop):
    "GSPO: the ratio of the sequence is the sum of the log ratios, without the division by the length"
    level, loss_type, epochs, eps, lr = "sequence", "grpo", 4, 0.05, 1e-3
    def sequence_ratio(s, x, lp): return ((lp - x.old) * x.mask).sum().exp()

class S03(Loop):
    "The sampler is a copy whose weights are never synchronised again; old log-probs are computed by the trainer"
    lr = 1e-3
    def build(s): s.engine = copy.deepcopy(s.model)
    def sampler(s): return s.engine

class LoraLinear(nn.Module):
    def __init__(s, lin, r, scale):
        super().__init__(); s.lin, s.scale = lin, scale
        s.A, s.B = nn.Parameter(torch.randn(r, lin.in_features) * 0.1), nn.Parameter(torch.zeros(lin.out_features, r))
    def forward(s, x): return s.lin(x) + s.scale * (x @ s.A.T @ s.B.T)
class Lora(Loop):
    lr, scale_r = 5e-3, 2.0
    extra = {"lora_r": 4, "lora_alpha": 8}
    def build(s):
        for p in s.model.parameters(): p.requires_grad_(False)
        for b in s.model.blocks: b.qkv, b.o = LoraLinear(b.qkv, 4, s.scale_r), LoraLinear(b.o, 4, s.scale_r)
class S04(Lora):
    "LoRA: the weights merged for the sampler use scale 1 instead of alpha / r"
    def sampler(s):
        m = copy.deepcopy(s.model)
        for b in m.blocks: b.qkv.scale = b.o.scale = 1.0
        return m

class S05(Loop):
    "RLOO: the mean of the others is divided by n, not by n - 1"
    framework = "my-rloo"; scale = "none"; extra = {"advantage_estimator": "rloo"}; group = 4
    def advantages(s, xs):
        for g in s.groups(xs):
            tot = sum(x.reward for x in g)
            for x in g: x.adv = x.reward - (tot - x.reward) / len(g)

class Tools(Loop):
    "A question mark calls a tool that writes [d]."
    max_new, model_looks = 6, True
    extra = {"max_turns": 2}
    def sample(s):
        xs = []
        for g in range(s.prompts):
            row = s.problem()
            xs += [S(prompt_ids=[BOS] + enc(row["prompt"]), row=row, group=g, ids=[], sampler=[], inserted=[]) for _ in range(s.group)]
        s.generate(xs)
        again = []
        for x in xs:
            q = CH.index("?") + 3
            if q in x.ids:
                k = x.ids.index(q) + 1
                x.ids, x.sampler, x.inserted = x.ids[:k], x.sampler[:k], x.inserted[:k]
                t = enc("[" + x.row["answer"] + "]")
                x.ids += t; x.sampler += [0.0] * len(t); x.inserted += [1] * len(t); again.append(x)
        if again: s.generate(again)
        return xs
class S06(Tools):
    "The tool mask is one token late: it was made for the shifted labels"
    def mask(s, x):
        m = super().mask(x); return torch.cat([m[:1], m[:-1]])

class S07(Loop):
    "The entropy bonus is added to the loss: entropy is minimised"
    extra = {"entropy_coef": 0.02}
    def extra_loss(s, xs, lps, Hs): return 0.02 * torch.cat(Hs).mean()
    def metrics(s, xs, ent): return {"entropy": ent, "entropy_coef": 0.02}

class KlReward(Ppo):
    beta, level, sign = 0.05, "kl_in_reward", 1
    def settings(s): return {**super().settings(), "kl_in_reward": True, "importance_sampling_level": "token"}
    def build(s): s.ref = copy.deepcopy(s.model)
    def token_reward(s, x):
        x.kl = x.old - x.ref
        return super().token_reward(x) - s.sign * s.beta * x.kl
    def scores(s, x):
        r = torch.zeros(len(x.ids)); r[-1] = x.reward; return r
    def row_fields(s, x): return {**super().row_fields(x), "kl": numbers(x.kl)}
class S08(KlReward):
    "The KL in the reward has the wrong sign: distance from the reference is paid"
    sign = -1; lr = 2e-3

class Dapo(Loop):
    eps_high, prompts = 0.28, 8
    def prepare(s, xs):
        keep = []
        for g in s.groups(xs):
            if len({x.reward for x in g}) > 1: keep += g
        return keep or xs
class S09(Dapo):
    "Dynamic sampling drops groups, but their advantages stay in the tensor: rows get those of others"
    def prepare(s, xs):
        keep = super().prepare(xs)
        for x, a in zip(keep, [x.adv for x in xs]): x.used = a
        for x in keep: x.adv = x.used
        return keep

class S10(Loop):
    "Old log-probs are computed with dropout"
    dropout = 0.1

class S11(Loop):
    "zero_grad is inside the accumulation loop: the gradient is that of the last micro-batch"
    prompts = 4; extra = {"gradient_accumulation_steps": 4}; lr = 1e-3
    def optimize(s, xs):
        total, n, L, H = 0.0, sum(float(x.mask.sum()) for x in xs), [], []
        for k in range(0, len(xs), 4):
            mb = xs[k : k + 4]; s.opt.zero_grad()
            lps, Hs = s.logps(s.model, mb, True)
            loss = sum((s.token_loss(x, lp) * x.mask).sum() for x, lp in zip(mb, lps)) / n
            loss.backward(); total += float(loss); L += [l.detach() for l in lps]; H += [float(h.mean()) for h in Hs]
        gn = nn.utils.clip_grad_norm_(s.parameters(), 1.0); s.opt.step()
        return L, total, float(gn), sum(H) / len(H)

class S12(Loop):
    "The loss is the mean over the padded matrix, not over the tokens of the mask"
    loss_type = "dapo"; epochs = 2; minibatches = 2
    def reduce(s, xs, ls):
        L = max(len(l) for l in ls)
        return torch.stack([F.pad(l * x.mask, (0, L - len(l))) for x, l in zip(xs, ls)]).mean()

class S13(Loop):
    "The reward reads prompt and completion: an answer digit in the prompt counts"
    def reward(s, x):
        t = x.row["prompt"] + dec(x.ids); return float(x.row["answer"] in t)
    def sample_fields(s, x):
        y = S(row=x.row, ids=[EOS]); return {"empty": {"right": s.reward(y)}, "alone": {"right": s.reward(x)}}

class S14(Loop):
    "Old log-probs are computed again before each of the epochs on a batch: the ratio is always 1"
    epochs, lr = 3, 1e-3
    def optimize(s, xs):
        for x, o in zip(xs, s.old(xs)): x.old = o
        return super().optimize(xs)

class S15(Loop):
    "PPO's clip takes the maximum of both surrogates instead of the minimum"
    epochs, lr, eps = 4, 2e-3, 0.1
    def token_loss(s, x, lp):
        r = (lp - x.old).exp(); return -torch.max(r * x.adv, r.clamp(1 - s.eps, 1 + s.eps) * x.adv)

class S16(Ppo):
    "Returns are made of the whitened advantages"
    def returns(s, xs):
        s.whiten(xs)
        for x in xs: x.ret = x.adv + x.values

class Packed(Loop):
    segmented = True
    extra = {"packing": True}
    def logps(s, m, xs, entropy=False):
        toks, H = [], []
        for k in range(0, len(xs), 4):
            part = xs[k : k + 4]; ids, seg, pos = [], [], []
            for j, x in enumerate(part):
                q = x.prompt_ids + x.ids; ids += q; seg += [j] * len(q); pos += list(range(len(q)))
            kw = {"segments": torch.tensor([seg])} if s.segmented else {}
            lp = (m(torch.tensor([ids]), position_ids=torch.tensor([pos]), **kw).logits[0] / s.temperature).log_softmax(-1)
            o = 0
            for x in part:
                a = o + len(x.prompt_ids) - 1; z = lp[a : a + len(x.ids)]
                toks.append(z.gather(1, torch.tensor(x.ids)[:, None])[:, 0]); H.append(-(z.exp() * z).sum(-1)); o += len(x.prompt_ids) + len(x.ids)
        return (toks, H) if entropy else toks
class S17(Packed):
    "Packed sequences see those before them in the pack"
    segmented = False; looks = False

class LeftPad(Loop):
    positions = True
    def logps(s, m, xs, entropy=False):
        P = max(len(x.prompt_ids) for x in xs); C = max(len(x.ids) for x in xs)
        ids = torch.tensor([[PAD] * (P - len(x.prompt_ids)) + x.prompt_ids + x.ids + [PAD] * (C - len(x.ids)) for x in xs])
        att = torch.tensor([[0] * (P - len(x.prompt_ids)) + [1] * (len(x.prompt_ids) + C) for x in xs])
        pos = (att.cumsum(1) - 1).clamp(min=0) if s.positions else None
        lp = (m(ids, att, pos).logits[:, P - 1 : -1] / s.temperature).log_softmax(-1)
        t = lp.gather(2, ids[:, P:, None])[..., 0]; H = -(lp.exp() * lp).sum(-1)
        cut = lambda z: [z[i, : len(x.ids)] for i, x in enumerate(xs)]
        return (cut(t), cut(H)) if entropy else cut(t)
class S18(LeftPad):
    "Prompts are padded on the left and the trainer gives no position ids"
    positions = False; model_looks = False

if __name__ == "__main__":
    run_loops({f"s{n:02d}": globals()[f"S{n:02d}"] for n in range(1, 19)})
