"""A trainer of packed rows in plain PyTorch: `python loops.py [name ...]` writes `runs`.

All rows of a forward pass lie in one stream, with places that begin anew and a mask of blocks. Prompts, turns and
answers are those of tiny's model of sums.
"""

import copy
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
from tiny import number, sample, tokenizer  # noqa: E402
from torch import nn  # noqa: E402
from world import model, sums, told  # noqa: E402

from covey.audit.writers.recorder import Recorder  # noqa: E402

TOK = tokenizer()
END, PAD = TOK.eos_token_id, TOK.pad_token_id


@dataclass
class Sample:
    """A completion on its way from the sampler to the optimizer."""

    row: dict
    group: int
    prompt: list
    ids: list = field(default_factory=list)
    said: list = field(default_factory=list)  # the sampler's log-probs
    mine: list = field(default_factory=list)  # 1 for the model's tokens, 0 for a tool's
    rewards: dict = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    spread: torch.Tensor = None  # the advantage of each token
    old: torch.Tensor = None
    ref: torch.Tensor = None
    weights: torch.Tensor = None
    place: tuple = ()

    @property
    def text(self):
        return TOK.decode(self.ids, skip_special_tokens=True)

    @property
    def ended(self):
        return self.ids[-1] == END


def stream(net, samples, hidden=False):
    """Logits of all places of all rows, the ids of the next places, and where each completion's log-probs are."""
    ids, places, owner, cuts = [], [], [], []
    for k, s in enumerate(samples):
        begin = len(ids) + len(s.prompt) - 1
        cuts.append((begin, begin + len(s.ids)))
        ids += s.prompt + s.ids
        places += range(len(s.prompt) + len(s.ids))
        owner += [k] * (len(s.prompt) + len(s.ids))
    owner = torch.tensor(owner)
    seen = (owner[:, None] == owner[None, :]).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    made = net(
        input_ids=torch.tensor([ids]), position_ids=torch.tensor([places]), attention_mask=mask,
        output_hidden_states=hidden, use_cache=False,
    )
    return made, torch.tensor(ids[1:]), cuts


def log_probs(net, samples, temperature):
    """Of each completion, the log-probs of its tokens, (T,)."""
    made, following, cuts = stream(net, samples)
    scores = (made.logits[0, :-1] / temperature).log_softmax(-1).gather(-1, following[:, None])[:, 0]
    return [scores[a:b] for a, b in cuts]


@torch.no_grad()
def alone(net, s, temperature):
    """The log-probs of a completion in a forward pass of its own."""
    ids = torch.tensor([s.prompt + s.ids])
    scores = (net(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[len(s.prompt) - 1 :, 0].tolist()


class Run:
    """DAPO's loss: a mean over the tokens of the batch."""

    prompts, group, limit, steps = 4, 4, 24, 8
    epochs = minibatches = micro = 1
    lr, temperature, beta = 1e-3, 1.0, 0.0
    epsilon = epsilon_high = 0.2
    loss_type, scale, level = "dapo", "group", "token"
    lag = 0  # how many updates the sampler is behind
    turns = False
    seed = 11

    def __init__(self, name):
        torch.manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.net = model().eval()
        self.reference = copy.deepcopy(self.net) if self.beta or type(self).needs_reference else None
        self.sampler = self.net
        self.past = []
        self.head = None
        self.best = torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=0.01)
        self.rows = self.problems()
        self.step = self.number = 0
        folder = HERE / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").unlink(missing_ok=True)
        self.file = Recorder(
            folder / "run.jsonl", framework="mine", settings=self.settings(),
            tokens={"eos": [END], "pad": PAD},
            data={"rows": len(self.rows), "distinct": len({r["prompt"] for r in self.rows})},
        )

    needs_reference = False

    def settings(self):
        return {
            "loss_type": self.loss_type, "scale_rewards": self.scale, "importance_sampling_level": self.level,
            "epsilon": self.epsilon, "epsilon_high": self.epsilon_high, "beta": self.beta,
            "temperature": self.temperature, "num_generations": self.group, "num_iterations": self.epochs,
            "max_completion_length": self.limit, "learning_rate": self.lr, "dtype": "float32",
        }

    def problems(self):
        return sums(48, seed=3)

    # ---- sampling

    def draw(self, contexts, most):
        return sample(self.sampler, TOK, contexts, most, self.temperature)

    def complete(self, samples):
        """Fill in the completions."""
        for s, ids, said in zip(samples, *self.draw([s.prompt for s in samples], self.limit)):
            s.ids, s.said, s.mine = ids, said, [1] * len(ids)

    def judge(self, s):
        """Partial credit for a near number."""
        said = number(s.text)
        near = 0.0 if said is None or len(said) > 6 else 1 / (1 + abs(int(said) - int(s.row["answer"])) / 4)
        return {"near": near}

    def rollout(self):
        rows = self.rng.sample(self.rows, self.prompts)
        samples = [Sample(r, g, TOK(r["prompt"])["input_ids"]) for g, r in enumerate(rows) for _ in range(self.group)]
        self.complete(samples)
        for k, s in enumerate(samples):
            s.rewards = self.judge(s)
            s.reward = sum(s.rewards.values())
            s.place = (self.number, k)
        rewards = torch.tensor([s.reward for s in samples]).view(-1, self.group)
        for s, a in zip(samples, self.advantages(rewards).flatten().tolist()):
            s.advantage = a
        self.spread(samples)
        return samples

    def advantages(self, rewards):
        return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

    def spread(self, samples):
        for s in samples:
            s.spread = torch.full((len(s.ids),), s.advantage)

    # ---- the loss

    def ratio(self, s, lp):
        if self.level == "token":
            return (lp - s.old).exp()
        mine = torch.tensor(s.mine, dtype=torch.float32)
        return (((lp - s.old) * mine).sum() / mine.sum()).exp().expand(len(lp))

    def token_losses(self, s, lp):
        ratio = self.ratio(s, lp)
        cut = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        losses = -torch.min(ratio * s.spread, cut * s.spread)
        if s.weights is not None:
            losses = losses * s.weights
        if self.beta:
            losses = losses + self.beta * self.kl(lp, s.ref)
        return losses

    def kl(self, lp, ref):
        return (ref - lp).exp() - (ref - lp) - 1

    def reduced(self, losses, part, whole):
        """The part's share of the loss of the whole."""
        masks = [torch.tensor(s.mine, dtype=torch.float32) for s in part]
        if self.loss_type == "dapo":
            return sum((x * m).sum() for x, m in zip(losses, masks)) / sum(sum(s.mine) for s in whole)
        if self.loss_type == "dr_grpo":
            return sum((x * m).sum() for x, m in zip(losses, masks)) / (len(whole) * self.limit)
        return sum((x * m).sum() / m.sum() for x, m in zip(losses, masks)) / len(whole)

    def correct(self, s):
        """Truncated weights, where the sampler is another policy than the one that the ratio begins with."""
        if self.lag:
            mine = torch.tensor(s.mine)
            s.weights = torch.where(mine == 1, (s.old - torch.tensor(s.said)).exp().clamp(max=2.0), torch.ones(()))

    def measure(self, samples):
        """Log-probs before the first update of a rollout: old ones and the reference's."""
        with torch.no_grad():
            for s, lp in zip(samples, log_probs(self.net, samples, self.temperature)):
                s.old = lp
            if self.reference is not None:
                for s, lp in zip(samples, log_probs(self.reference, samples, self.temperature)):
                    s.ref = lp
        for s in samples:
            self.correct(s)

    def loss_of(self, part, whole):
        """The part's loss, and log-probs whose gradient is kept."""
        lps = log_probs(self.net, part, self.temperature)
        return self.reduced([self.token_losses(s, lp) for s, lp in zip(part, lps)], part, whole), lps

    def update(self, batch, **metrics):
        """One step of the optimizer, over micro-batches."""
        self.best.zero_grad()
        rows, total = [], 0.0
        size = -(-len(batch) // self.micro)
        for at in range(0, len(batch), size):
            part = batch[at : at + size]
            loss, lps = self.loss_of(part, batch)
            for lp in lps:
                lp.retain_grad()
            self.and_more(loss, part).backward()
            total += loss.item()
            rows += [self.written(s, lp) for s, lp in zip(part, lps)]
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0).item()
        before = [p.detach().clone() for p in self.net.parameters()]
        self.best.step()
        after = list(self.net.parameters())
        changed = sum((a != b).sum().item() for a, b in zip(before, after)) / sum(a.numel() for a in after)
        for row, s in zip(rows, batch):
            row["after_logprobs"] = alone(self.net, s, self.temperature)
        self.file.write(
            kind="update", step=self.step, rows=rows, loss=total, grad_norm=norm, learning_rate=self.lr,
            weights_changed=changed, **({"metrics": metrics} if metrics else {}),
        )
        self.step += 1
        self.past.append(copy.deepcopy(self.net.state_dict()))

    def and_more(self, loss, part):
        return loss

    def written(self, s, lp):
        row = {
            "rollout": s.place[0], "completion": s.place[1], "mask": s.mine, "logprobs": lp.detach().tolist(),
            "old_logprobs": s.old.tolist(), "advantage": s.spread.tolist(), "gradients": lp.grad.tolist(),
        }
        if len(set(s.spread.tolist())) == 1:
            row["advantage"] = s.spread[0].item()
        if s.weights is not None:
            row["corrections"] = s.weights.tolist()
        if self.beta:
            row |= {"ref_logprobs": s.ref.tolist(), "kl": self.kl(lp.detach(), s.ref).tolist()}
        return row

    # ---- the course

    def record(self, samples):
        completions = []
        for s in samples:
            line = {
                "prompt": s.row["prompt"], "prompt_ids": s.prompt, "text": s.text, "ids": s.ids, "group": s.group,
                "row": s.row, "rewards": s.rewards, "reward": s.reward, "advantage": s.advantage,
                "sampler_logprobs": s.said, "model_logprobs": alone(self.sampler, s, self.temperature),
                "model_logprobs_at_1": alone(self.sampler, s, 1.0),
            }
            if self.turns:
                line["inserted"] = [1 - m for m in s.mine]
            completions.append(line)
        self.file.write(kind="rollout", number=self.number, step=self.step, completions=completions)
        self.number += 1

    def synchronize(self):
        if self.lag:
            self.sampler = copy.deepcopy(self.net)
            if len(self.past) > self.lag:
                self.sampler.load_state_dict(self.past[-1 - self.lag])
            elif self.past:
                self.sampler.load_state_dict(model().state_dict())

    def learn(self, samples):
        """Epochs over shuffled minibatches."""
        for _ in range(self.epochs):
            self.rng.shuffle(samples)
            size = len(samples) // self.minibatches
            for at in range(0, len(samples), size):
                self.update(samples[at : at + size])

    def gather(self):
        """The rollouts of one step, written as they come."""
        samples = self.rollout()
        self.record(samples)
        return samples

    def run(self):
        for _ in range(self.steps):
            self.synchronize()
            samples = self.gather()
            self.measure(samples)
            self.learn(samples)


class Calculator(Run):
    """Two turns: the model speaks, a calculator answers, the model speaks again."""

    turns = True
    limit = 48

    def context(self, s, line):
        return s.prompt + s.ids + line

    def complete(self, samples):
        lines = []
        for s, ids, said in zip(samples, *self.draw([s.prompt for s in samples], 8)):
            s.ids, s.said, s.mine = ids, said, [1] * len(ids)
            lines.append(TOK(told(*map(int, re.findall(r"\d+", s.row["prompt"])[:2])))["input_ids"])
        contexts = [self.context(s, line) for s, line in zip(samples, lines)]
        for s, line, ids, said in zip(samples, lines, *self.draw(contexts, 10)):
            self.join(s, line, ids, said)

    def join(self, s, line, ids, said):
        s.ids = s.ids + line + ids
        s.said = s.said + [0.0] * len(line) + said
        s.mine = s.mine + [0] * len(line) + [1] * len(ids)

    def judge(self, s):
        says = TOK.decode(s.ids[-s.mine[::-1].index(0) :], skip_special_tokens=True)
        said = number(says)
        near = 0.0 if said is None or len(said) > 6 else 1 / (1 + abs(int(said) - int(s.row["answer"])) / 4)
        return {"near": near}


class Critic(Run):
    """PPO: a critic on the policy's hidden states, GAE, two epochs of two minibatches."""

    group, prompts, epochs, minibatches, steps = 1, 16, 2, 2, 5
    gamma, lam = 1.0, 0.9

    def __init__(self, name):
        super().__init__(name)
        self.head = nn.Linear(self.net.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        self.best.add_param_group({"params": list(self.head.parameters()), "lr": 1e-2})

    def settings(self):
        mine = super().settings()
        for name in ("scale_rewards", "num_generations"):
            del mine[name]
        return mine | {"algorithm": "ppo", "gamma": self.gamma, "lam": self.lam}

    def values(self, samples):
        made, _, cuts = stream(self.net, samples, hidden=True)
        values = self.head(made.hidden_states[-1][0])[:, 0]
        return [values[a:b] for a, b in cuts]

    def advantages(self, rewards):
        return rewards

    def spread(self, samples):
        with torch.no_grad():
            for s, values in zip(samples, self.values(samples)):
                s.values = values
                s.paid = torch.zeros(len(s.ids))
                s.paid[-1] = s.reward
                s.spread = self.estimate(s.paid, values, self.gamma, self.lam)
                s.returns = s.spread + values

    def estimate(self, paid, values, gamma, lam):
        made = torch.zeros(len(paid))
        later = 0.0
        for t in reversed(range(len(paid))):
            following = values[t + 1] if t + 1 < len(paid) else 0.0
            later = paid[t] + gamma * following - values[t] + gamma * lam * later
            made[t] = later
        return made

    def and_more(self, loss, part):
        errors = [((v - s.returns) ** 2).sum() for v, s in zip(self.values(part), part)]
        return loss + 0.5 * sum(errors) / sum(len(s.ids) for s in part)

    def record(self, samples):
        write = self.file.write

        def without_advantages(**line):
            for made in line["completions"]:
                del made["advantage"]
            write(**line)

        self.file.write = without_advantages
        super().record(samples)
        self.file.write = write

    def written(self, s, lp):
        row = super().written(s, lp)
        row |= {"values": s.values.tolist(), "returns": s.returns.tolist(), "token_rewards": s.paid.tolist()}
        return {**row, "advantage": s.spread.tolist()}


CASES = {}


def case(run):
    CASES[run.__name__] = run
    return run


# ---- with a mistake ------------------------------------------------------------------------------


@case
class s21_advantages_slide(Run):
    """Lengths are counted without the end token, so each packed row's advantages begin a token earlier."""

    def spread(self, samples):
        lengths = torch.tensor([len(s.ids) - s.ended for s in samples])
        flat = torch.tensor([s.advantage for s in samples]).repeat_interleave(lengths)
        flat = torch.cat([flat, torch.zeros(len(samples))])
        at = 0
        for s in samples:
            s.spread = flat[at : at + len(s.ids)]
            at += len(s.ids)


@case
class s22_tool_tokens_in_the_denominator(Calculator):
    """The token mean divides by all of the response, the calculator's tokens as well, so each update is damped."""

    def reduced(self, losses, part, whole):
        masks = [torch.tensor(s.mine, dtype=torch.float32) for s in part]
        return sum((x * m).sum() for x, m in zip(losses, masks)) / sum(len(s.ids) for s in whole)


@case
class s23_filter_keeps_the_dead(Run):
    """Dynamic sampling has its condition inverted: groups whose rewards are all equal are kept, the others go."""

    temperature, steps = 0.6, 8

    def judge(self, s):
        return {"right": float(number(s.text) == s.row["answer"])}

    def gather(self):
        kept = []
        while len(kept) < 2 * self.group:
            samples = self.rollout()
            self.record(samples)
            for g in range(self.prompts):
                one = samples[g * self.group : (g + 1) * self.group]
                if len({s.reward for s in one}) == 1:
                    kept += one
        return kept


@case
class s24_old_in_the_inner_ratio(Run):
    """GSPO-token is written with the old log-probs where the detached ones belong: the ratio counts twice."""

    loss_type, level, epochs, minibatches, epsilon, epsilon_high, lr = "grpo", "sequence", 3, 2, 0.2, 0.2, 5e-4
    steps = 4

    def ratio(self, s, lp):
        whole = (lp - s.old).mean().exp().detach()
        return whole * (lp - s.old).exp()


@case
class s25_correction_upside_down(Run):
    """The sampler is two updates behind, and the weights are sampler over trainer in place of trainer over sampler."""

    lag, lr = 2, 2e-3

    def correct(self, s):
        s.weights = (torch.tensor(s.said) - s.old).exp().clamp(max=2.0)


@case
class s26_longest_is_the_constant(Run):
    """Dr. GRPO's constant is the longest completion of each micro-batch, so short micro-batches count more."""

    loss_type, scale, micro = "dr_grpo", "none", 4

    def advantages(self, rewards):
        return rewards - rewards.mean(1, keepdim=True)

    def reduced(self, losses, part, whole):
        longest = max(len(s.ids) for s in part)
        return sum(x.sum() for x in losses) / (len(whole) * longest)


@case
class s27_stop_by_the_reference(Run):
    """The early stop asks the KL to the reference, not to the old policy: soon each rollout gets one update of four."""

    epochs, minibatches, steps, needs_reference, target = 1, 4, 8, True, 0.05

    def learn(self, samples):
        self.rng.shuffle(samples)
        size = len(samples) // self.minibatches
        for at in range(0, len(samples), size):
            part = samples[at : at + size]
            self.update(part)
            with torch.no_grad():
                now = log_probs(self.net, part, self.temperature)
            if sum((lp - s.ref).sum().item() for lp, s in zip(now, part)) / sum(len(lp) for lp in now) > self.target:
                break


@case
class s28_gamma_and_lambda_swapped(Critic):
    """gae(rewards, values, lam, gamma) is called in the wrong order: rewards are discounted by 0.9."""

    def estimate(self, paid, values, gamma, lam):
        return super().estimate(paid, values, lam, gamma)


@case
class s29_log_probs_without_the_tool(Calculator):
    """The engine's log-probs have no entry for the tool's tokens, so behind the first call they lie too early."""

    lag = 1

    def join(self, s, line, ids, said):
        super().join(s, line, ids, said)
        spoken = [lp for lp, m in zip(s.said, s.mine) if m]
        s.said = spoken + [0.0] * len(line)


@case
class s30_reasoning_is_stripped(Calculator):
    """The chat template drops the first turn from the history: the second is sampled without it and trained with it."""

    def context(self, s, line):
        return s.prompt + line


@case
class s31_controller_upside_down(Run):
    """The KL's coefficient shrinks when the KL is above its target and grows when below: it runs away."""

    beta, target, steps, lr = 0.05, 0.02, 12, 2e-3

    def learn(self, samples):
        with torch.no_grad():
            now = [self.kl(s.old, s.ref) for s in samples]
        kl = sum(x.sum().item() for x in now) / sum(len(x) for x in now)
        self.update(samples, kl_coef=self.beta, mean_kl=kl)
        self.beta *= 0.6 if kl > self.target else 1.6


@case
class s32_baseline_of_the_first(Run):
    """Mean and deviation of a group are taken before all rewards are in: the baseline is the first completion's."""

    def advantages(self, rewards):
        return (rewards - rewards[:, :1]) / (rewards.std(1, keepdim=True) + 1e-4)


@case
class s33_prompt_in_the_loss(Run):
    """The loss's mask is the attention mask, so the question's tokens are pushed with the answer's advantage."""

    def loss_of(self, part, whole):
        made, following, cuts = stream(self.net, part)
        scores = (made.logits[0, :-1] / self.temperature).log_softmax(-1).gather(-1, following[:, None])[:, 0]
        lps = [scores[a:b] for a, b in cuts]
        total = 0.0
        for s, lp, (a, _) in zip(part, lps, cuts):
            asked = scores[a - len(s.prompt) + 1 : a]
            total = total + self.token_losses(s, lp).sum() - ((asked - asked.detach()).exp() * s.advantage).sum()
        return total / sum(len(s.prompt) - 1 + len(s.ids) for s in whole), lps

    def written(self, s, lp):
        return {**super().written(s, lp), "prompt_trained": len(s.prompt) - 1}


# ---- without a mistake ---------------------------------------------------------------------------


@case
class n21_dapo(Run):
    """Sound: DAPO with its filter, clip-higher, a soft penalty for length, micro-batches and two minibatches."""

    epsilon_high, minibatches, micro, limit, steps, lr = 0.28, 2, 2, 20, 6, 3e-4

    def judge(self, s):
        right = float(number(s.text) == s.row["answer"])
        return {"right": right, "overlong": -min(1.0, max(0.0, (len(s.ids) - 8) / 12))}

    def gather(self):
        kept = []
        for _ in range(6):
            samples = self.rollout()
            self.record(samples)
            for g in range(self.prompts):
                one = samples[g * self.group : (g + 1) * self.group]
                if 0 < sum(s.rewards["right"] for s in one) < self.group:
                    kept += one
            if len(kept) >= 16:
                break
        return kept[:16]


@case
class n22_asynchronous(Run):
    """Sound: the sampler is two updates behind, truncated weights correct it, temperature 0.8."""

    lag, temperature, lr = 2, 0.8, 3e-4


@case
class n23_gspo(Run):
    """Sound: GSPO, two epochs of two minibatches, groups of eight."""

    loss_type, level, epochs, minibatches, group, prompts = "grpo", "sequence", 2, 2, 8, 2
    epsilon, epsilon_high, steps, lr = 0.01, 0.02, 5, 1e-4


@case
class n24_leave_one_out_constant(Run):
    """Sound: leave-one-out baselines, no std, a constant length as divisor, weight decay, micro-batches."""

    loss_type, scale, micro = "dr_grpo", "none", 4

    def advantages(self, rewards):
        return (rewards - rewards.mean(1, keepdim=True)) * self.group / (self.group - 1)


@case
class n25_controller(Run):
    """Sound: a proportional controller of the KL's coefficient, as of Ziegler et al."""

    beta, target, steps, lr = 0.05, 0.05, 12, 5e-4

    def learn(self, samples):
        with torch.no_grad():
            now = [self.kl(s.old, s.ref) for s in samples]
        kl = sum(x.sum().item() for x in now) / sum(len(x) for x in now)
        self.update(samples, kl_coef=self.beta, mean_kl=kl)
        self.beta *= 1 + 0.5 * max(-0.2, min(0.2, kl / self.target - 1))


@case
class n26_calculator(Calculator):
    """Sound: two turns with a calculator, its tokens outside loss and mean, a sampler one update behind, a KL."""

    lag, beta = 1, 0.02


@case
class n27_critic_stops_early(Critic):
    """Sound: PPO whose epochs stop when the KL to the old policy is above its target."""

    epochs, target, steps, lr = 4, 0.01, 4, 2e-4

    def learn(self, samples):
        for _ in range(self.epochs):
            self.rng.shuffle(samples)
            for part in (samples[:8], samples[8:]):
                self.update(part)
            with torch.no_grad():
                now = log_probs(self.net, samples, self.temperature)
            if sum((s.old - lp).sum().item() for lp, s in zip(now, samples)) / sum(map(len, now)) > self.target:
                break


if __name__ == "__main__":
    for name, run in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            run(name).run()
