"""More loops, two of verl's dumps and two exports of logs, simulated."""
from world import *
from sick import Ppo, Dapo
import json, csv

class S19(Loop):
    "The loop cuts completions at the end token before it trains: the end token is never trained"
    def sample(s):
        xs = super().sample()
        for x in xs:
            x.done = x.ids[-1] == EOS
            if x.done and len(x.ids) > 1: x.ids.pop(); x.sampler.pop(); x.inserted.pop()
        return xs
    def reward(s, x): return float(x.done and dec(x.ids).strip()[-1:] == x.row["answer"])

class S20(Loop):
    "A filter that was made for supervised training keeps only completions with a positive advantage"
    def prepare(s, xs): return [x for x in xs if x.adv > 0] or xs

class S21(Loop):
    "The sampler keeps the 3 likeliest tokens; the trainer's log-probs are of all"
    extra = {"top_k": 3}
    @torch.no_grad()
    def generate(s, samples, limit=None):
        m = s.model
        for x in samples:
            for _ in range(s.max_new):
                z = m(torch.tensor([x.prompt_ids + x.ids])).logits[0, -1]
                top = z.topk(3); lp = top.values.log_softmax(-1); k = int(torch.multinomial(lp.exp(), 1))
                x.ids.append(int(top.indices[k])); x.sampler.append(float(lp[k])); x.inserted.append(0)
                if x.ids[-1] == EOS: break

class S22(Loop):
    "The ratio's old log-probs are the reference's"
    beta, lr, steps = 0.04, 2e-3, 8
    def build(s): s.ref = copy.deepcopy(s.model)
    def old(s, xs):
        with torch.no_grad(): return s.logps(s.ref, xs)

class S23(Loop):
    "The KL k3 in the loss has policy and reference exchanged"
    beta, lr, epochs = 0.2, 2e-3, 2
    def build(s): s.ref = copy.deepcopy(s.model)
    def token_loss(s, x, lp):
        b, s.beta = s.beta, 0; l = super().token_loss(x, lp); s.beta = b
        return l + b * ((lp - x.ref).exp() - (lp - x.ref) - 1)

class S24(Loop):
    "Rewards are collected as the verifiers finish (asyncio.as_completed): their order is not that of the completions"
    def sample(s):
        xs = super().sample()
        vals = [s.reward(x) for x in xs]
        order = sorted(range(len(xs)), key=lambda i: len(xs[i].ids) + s.rng.random())
        for x, i in zip(xs, order): x.got = vals[i]
        return xs
    def finish(s, x): x.text = dec(x.ids); x.reward = x.got; x.rewards = {"right": x.got}
    def sample_fields(s, x): return {"alone": {"right": s.reward(x)}}

class S25(S24):
    "As s24, without rewards asked again"
    steps = 16; seed = 7
    def sample_fields(s, x): return {}

class S26(Loop):
    "The KL in the loss: the reference is a moving average of the policy, by a callback left from another project"
    beta, lr, steps = 0.1, 2e-3, 10
    def build(s): s.ref = copy.deepcopy(s.model)
    def after_step(s, it):
        with torch.no_grad():
            for p, q in zip(s.ref.parameters(), s.model.parameters()): p.lerp_(q, 0.3)

class S27(Loop):
    "The mask counts from the prompt's padded end in a batch of left-padded prompts: it starts a token late"
    def mask(s, x):
        m = super().mask(x); m[0] = 0; return m

class S28(Ppo):
    "Token rewards of PPO: the score is at the last place of the padded row, not at the end token (lost for short rows)"
    def token_reward(s, x):
        r = torch.zeros(len(x.ids))
        if len(x.ids) == s.max_new: r[-1] = x.reward
        return r

class N20(Loop):
    "RAFT on purpose: the best of each group, negative log likelihood"
    extra = {"algorithm": "raft"}; loss_type = "dapo"
    def settings(s): return {k: v for k, v in super().settings().items() if k in ("temperature", "num_generations", "learning_rate", "max_completion_length", "max_grad_norm", "algorithm")}
    def advantages(s, xs):
        for x in xs: x.adv = float(x.reward > 0)
    def prepare(s, xs): return [x for x in xs if x.adv > 0] or xs[:1]
    def token_loss(s, x, lp): return -lp * x.adv

class N21(Loop):
    "Old log-probs are the sampler's, which computes in bfloat16"
    epochs = 2; extra = {"old_logprobs": "sampler"}
    def sampler(s): return s.model
    def sample(s):
        xs = super().sample()
        for x in xs: x.sampler = [v + random.gauss(0, 0.01) for v in x.sampler]
        return xs
    def old(s, xs): return [torch.tensor(x.sampler) for x in xs]

class N22(Ppo):
    "PPO with rewards at each token: a small fine each, gamma 1, advantages not whitened, rewards -10..10"
    def token_reward(s, x):
        r = torch.full((len(x.ids),), -0.1); r[-1] += x.reward; return r
    def reward(s, x): return 20 * super().reward(x) - 10
    def whiten(s, xs): pass

class N23(Loop):
    "Cold sampling: temperature 0.3 in both places, half of the groups are of equal completions; groups of 8"
    temperature, group, prompts = 0.3, 8, 3

class N24(Loop):
    "Two rewards with weights 1 and 0.2; the second is the length's fine; learning rate warm-up of 3 of 10 steps, then constant"
    extra = {"reward_weights": [1.0, 0.2], "warmup_steps": 3}; steps = 10
    def finish(s, x):
        x.text = dec(x.ids); x.rewards = {"right": s.reward(x), "short": -len(x.ids) / 8}; x.reward = x.rewards["right"] + 0.2 * x.rewards["short"]
    def schedule(s, it):
        for g in s.opt.param_groups: g["lr"] = s.lr * min(1, it / 3)

def verl_dump(name, shift):
    folder = HERE / "runs" / name; l = Loop(name); (folder / "run.jsonl").unlink()
    for step in range(1, 6):
        xs = l.sample()
        for x in xs: l.finish(x)
        sc = [x.reward for x in xs]
        if shift: sc = sc[-1:] + sc[:-1]
        with open(folder / f"{step}.jsonl", "w") as f:
            for x, v in zip(xs, sc):
                f.write(json.dumps(dict(input="user\nWhat is " + x.row["prompt"] + "\nassistant\n", output=dec(x.ids), gts=x.row["answer"], score=v, step=step, acc=v)) + "\n")

def wandb_csv(name, sick):
    r = random.Random(3)
    with open(HERE / "runs" / f"{name}.csv", "w", newline="") as f:
        w = csv.writer(f); cols = ["_step", "actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "critic/advantages/max", "critic/advantages/min", "response_length/mean", "response_length/clip_ratio", "training/global_step", "val-core/gsm8k/acc/mean@1"]
        w.writerow(cols)
        for t in range(1, 101):
            sc = 0.3 + (0.004 * t if not sick else 0.0) + r.gauss(0, 0.02)
            lr = 1e-6 if not sick else max(0.0, 1e-6 * (1 - t / 25))   # scheduler stepped for each of four micro-batches
            val = f"{sc:.3f}" if t % 10 == 0 else ""
            if t > 25 and sick: sc = 0.38 + r.gauss(0, 0.02)
            w.writerow([t, r.gauss(0, 0.01), abs(r.gauss(0.3, 0.05)), lr, 0.4 - 0.001 * (t if not sick else min(t, 25)), 1e-4, 0.002, sc, sc, 0.0, 2.4, -2.3, 240 + r.gauss(0, 5), 0.02, t, val])

if __name__ == "__main__":
    for n, c in sorted(globals().items()):
        if n[0] in "SN" and n[1:].isdigit() and c.__module__ == "__main__": c(n.lower()).run(); print(n, "ok", flush=True)
    verl_dump("s29", True); verl_dump("n25", False); wandb_csv("s30", True); wandb_csv("n26", False)
