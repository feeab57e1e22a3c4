"""Sound loops of many kinds."""
from world import *
from sick import Ppo, Lora, Tools, KlReward, Dapo, Packed, LeftPad

class N01(Loop):
    "REINFORCE with a moving baseline, rewards of 0..100, one completion each problem"
    group, prompts, loss_type, scale = 1, 16, "dapo", "none"
    extra = {"advantage_estimator": "reinforce", "baseline": "moving average"}
    base = 30.0
    def settings(s): return {k: v for k, v in super().settings().items() if k not in ("epsilon", "num_iterations", "scale_rewards")}
    def reward(s, x): return 100.0 * super().reward(x)
    def advantages(s, xs):
        for x in xs: x.adv = (x.reward - s.base) / 50
        s.base = 0.9 * s.base + 0.1 * sum(x.reward for x in xs) / len(xs)
    def token_loss(s, x, lp): return -x.adv * lp

class N02(Loop):
    "RLOO, groups of 2, rewards -1 and 1"
    group, prompts, scale = 2, 8, "none"; extra = {"advantage_estimator": "rloo"}
    def reward(s, x): return 2 * super().reward(x) - 1
    def advantages(s, xs):
        for g in s.groups(xs):
            for x in g: x.adv = x.reward - sum(y.reward for y in g if y is not x) / (len(g) - 1)

class N03(Loop):
    "GRPO with groups of different size: some completions time out and are dropped"
    def size(s, g): return s.rng.choice([2, 3, 5, 6])
    def settings(s): d = super().settings(); d.pop("num_generations"); return d

class N04(Loop):
    "Dr. GRPO"
    loss_type, scale = "dr_grpo", "none"
    def advantages(s, xs):
        for g in s.groups(xs):
            m = sum(x.reward for x in g) / len(g)
            for x in g: x.adv = x.reward - m

class N05(Ppo):
    "PPO, critic, two epochs of two minibatches"

class N06(Dapo):
    "DAPO: clip-higher, groups of one reward dropped, a fine for long answers"
    loss_type = "dapo"; epochs = 2
    def finish(s, x):
        x.text = dec(x.ids); c = s.reward(x); f = -min(1.0, max(0, len(x.ids) - 5) / 3)
        x.rewards = {"right": c, "overlong": f}; x.reward = c + f

class N07(Loop):
    "GSPO, four epochs"
    level, loss_type, epochs, eps, lr = "sequence", "grpo", 4, 0.05, 1e-3

class N08(Loop):
    "Asynchronous: the sampler is two updates behind; truncated importance weights against the sampler"
    lr = 1e-3; steps = 10
    extra = {"importance_sampling_correction": True, "importance_sampling_cap": 2.0, "staleness": 2}
    def build(s): s.past = [copy.deepcopy(s.model)]
    def sampler(s): return s.past[0]
    def after_step(s, step): s.past.append(copy.deepcopy(s.model)); s.past = s.past[-3:]
    def shape(s, xs):
        for x in xs: x.cor = (x.old - torch.tensor(x.sampler)).exp().clamp(max=2.0)
    def token_loss(s, x, lp): return x.cor * super().token_loss(x, lp)
    def row_fields(s, x): return {"corrections": numbers(x.cor)}
    def plain(s, x): return super().plain(x)
    model_looks = False

class N09(Tools):
    "Tool calls, whose tokens are masked"

class N10(Lora):
    "LoRA with scale 2, sampler by a merged copy"

class N11(Packed):
    "Packed sequences with a mask of blocks"

class N12(Loop):
    "Entropy bonus with coefficient 0.01"
    extra = {"entropy_coef": 0.01}
    def extra_loss(s, xs, lps, Hs): return -0.01 * torch.cat(Hs).mean()
    def metrics(s, xs, ent): return {"entropy": ent, "entropy_coef": 0.01}

class N13(KlReward):
    "PPO with the KL in the reward"

class N14(Loop):
    "KL in the loss (k3), the reference is set to the policy every fourth step on purpose (ProRL)"
    beta, lr, epochs, steps = 0.1, 1e-3, 2, 9
    extra = {"sync_ref_model": True, "ref_model_sync_steps": 8, "ref_model_mixup_alpha": 1.0}
    def build(s): s.ref = copy.deepcopy(s.model)
    def after_step(s, it):
        if it % 4 == 3: s.ref = copy.deepcopy(s.model)

class N15(LeftPad):
    "Temperature 0.7 in both places; halfway the learning rate goes to a fifth and the clip range to 0.1 on purpose"
    temperature = 0.7
    def schedule(s, it):
        if it == 4:
            s.eps = 0.1
            for g in s.opt.param_groups: g["lr"] = s.lr / 5

class N16(Loop):
    "Curriculum: two numbers, then three, then four; the reward falls"
    steps = 9
    def schedule(s, it): s.digits = [(2,), (3,), (4,)][it // 3]

class N17(Loop):
    "A resumed run: the record starts at step 120; a warm-up of the optimizer again, linear decay to 0 at the end"
    first_step = 120; steps = 10
    extra = {"lr_scheduler_type": "linear"}
    def schedule(s, it):
        f = min(1.0, (it + 1) / 3) * (10 - it) / 10
        for g in s.opt.param_groups: g["lr"] = s.lr * f

class N18(Loop):
    "REINFORCE++: no groups, rewards are negative (seconds), normalised over the batch"
    group, prompts, scale = 1, 16, "batch"
    def reward(s, x): return -len(x.ids) / 3 - 2.0 * (1 - super().reward(x))
    def advantages(s, xs):
        r = torch.tensor([x.reward for x in xs]); a = (r - r.mean()) / (r.std() + 1e-8)
        for x, v in zip(xs, a): x.adv = float(v)

class N19(Loop):
    "GRPO, evaluation after every third step in the metrics only; greedy eval; truncated completions are masked; k1 KL 0"
    max_new = 4; extra = {"mask_truncated_completions": True}; steps = 9
    def mask(s, x): return super().mask(x) * float(x.ids[-1] == EOS)
    def metrics(s, xs, ent): return {"entropy": ent, **({"eval/reward": 0.4 + 0.01 * s.step_now} if s.step_now % 3 == 2 else {})}

if __name__ == "__main__":
    run_loops({f"n{n:02d}": globals()[f"N{n:02d}"] for n in range(1, 20)})
