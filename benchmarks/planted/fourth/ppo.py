"""PPO with a critic in numpy and torch: sound, and with a GAE that does not stop at a completion's end."""
from loop import *
def gae(r, v, gamma, lam, cut):
    # rows are laid out one behind another, as in a packed batch; `cut` forgets the end of a row
    n = sum(map(len, r)); R = [x for y in r for x in y]; Vv = [x for y in v for x in y]; end = [k == len(y) - 1 for y in r for k in range(len(y))]
    A = [0.0] * n; last = 0.0
    for t in reversed(range(n)):
        stop = (t == n - 1) if cut else end[t]
        nxt = 0.0 if stop else Vv[t + 1]
        last = R[t] + gamma * nxt - Vv[t] + gamma * lam * (0.0 if stop else last)
        A[t] = last
    out, k = [], 0
    for y in r: out.append(A[k:k + len(y)]); k += len(y)
    return out

def ppo(name, cut, steps=10, N=48, gamma=1.0, lam=.95, coef=.05, lr=3e-4):
    torch.manual_seed(2); random.seed(2)
    m, ref = base(), base(); opt = torch.optim.AdamW(m.parameters(), lr); gen = torch.Generator().manual_seed(3)
    lines = [{"format": "covey-audit", "version": 2, "framework": "mine", "settings": {"temperature": 1.0, "gamma": gamma, "lam": lam, "kl_coef": coef, "cliprange": .2, "cliprange_value": .2, "vf_coef": .5, "learning_rate": lr, "dtype": "float32", "adv_estimator": "gae"}, "tokens": {"bos": BOS, "eos": [EOS], "pad": PAD}}]
    for s in range(steps):
        pr = [[BOS, D0 + random.randrange(10), PLUS, D0 + random.randrange(10), EQ] for _ in range(N)]
        ids, lps, _ = sample(m, pr, generator=gen)
        with torch.no_grad(): old, _, val = logps(m, pr, ids, value=True); rl, _ = logps(ref, pr, ids)
        sc, rw, vv = [], [], []
        for k, i in enumerate(ids):
            w = D0 + (max(pr[k][1], pr[k][3]) - D0 + 1) % 10
            ok = 1.0 if i[-1] == EOS and len(i) > 1 and i[-2] == w else 0.0
            z = [0.0] * (len(i) - 1) + [ok]; sc.append(z); vv.append([float(x) for x in val[k][:len(i)]])
            rw.append([a - coef * float(old[k, t] - rl[k, t]) for t, a in enumerate(z)])
        A = gae(rw, vv, gamma, lam, cut); ret = [[a + b for a, b in zip(x, y)] for x, y in zip(A, vv)]
        lines.append({"kind": "rollout", "number": s, "step": s, "completions": [{"prompt": text(pr[k]), "prompt_ids": pr[k], "text": text(i), "ids": i, "rewards": {"correct": sc[k][-1]}, "reward": sc[k][-1], "sampler_logprobs": lps[k], "model_logprobs": cut_(old, ids)[k]} for k, i in enumerate(ids)]})
        L = max(map(len, ids)); pad = lambda x: torch.tensor([y + [0.0] * (L - len(y)) for y in x])
        mask, a, rt = pad([[1.0] * len(i) for i in ids]), pad(A), pad(ret)
        lp, _, v = logps(m, pr, ids, value=True)
        ratio = (lp - old).exp(); pg = (-torch.min(ratio * a, ratio.clamp(.8, 1.2) * a) * mask).sum() / mask.sum()
        vl = (((v - rt) ** 2) * mask).sum() / mask.sum()
        loss = pg + .5 * vl; opt.zero_grad(); loss.backward(); gn = float(nn.utils.clip_grad_norm_(m.parameters(), 1.0)); opt.step()
        with torch.no_grad(): after, _ = logps(m, pr, ids)
        lines.append({"kind": "update", "step": s, "loss": float(pg), "grad_norm": gn, "learning_rate": lr, "metrics": {"value_loss": float(vl), "reward": sum(x[-1] for x in sc) / N}, "rows": [
            {"rollout": s, "completion": k, "mask": [1] * len(i), "logprobs": cut_(lp, ids)[k], "old_logprobs": cut_(old, ids)[k], "ref_logprobs": cut_(rl, ids)[k], "advantage": A[k], "token_rewards": rw[k], "token_scores": sc[k], "kl": [float(old[k, t] - rl[k, t]) for t in range(len(i))], "values": vv[k], "returns": ret[k], **({"after_logprobs": cut_(after, ids)[k]} if s < 3 else {})} for k, i in enumerate(ids)]})
    f = HERE / "runs" / name; f.mkdir(parents=True, exist_ok=True); (f / "run.jsonl").write_text("".join(json.dumps(l) + "\n" for l in lines))
    print(name, [l["metrics"]["reward"] for l in lines if l.get("kind") == "update"])
cut_ = cut
ppo("s11_gae_over_end", True); ppo("n12_ppo", False)
