"""A trainer of padded batches in plain PyTorch, hook by hook: `python loops.py [name ...]` writes `runs`.

Rollouts are dictionaries that are kept in a list; what a run does otherwise is a method of its own.
"""

import copy
import random
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "eighth")]  # tiny.py and world.py
import torch  # noqa: E402
from tiny import number, sample, tokenizer  # noqa: E402
from torch import nn  # noqa: E402
from world import model, sums  # noqa: E402

from covey.audit.writers.recorder import Recorder  # noqa: E402

TOK = tokenizer()
END, PAD = TOK.eos_token_id, TOK.pad_token_id
CASES = {}


def case(run):
    CASES[run.__name__] = run
    return run


def padded(lists, value=0.0):
    """Lists of numbers as a tensor, filled up on the right."""
    wide = max(map(len, lists))
    return torch.tensor([list(x) + [value] * (wide - len(x)) for x in lists])


def forward(net, rolls, temperature, hidden=False):
    """Log-probs of the completions' tokens, (N, T), padded on the right with 0; entropies or hidden states too."""
    ids = padded([r["prompt_ids"] + r["ids"] for r in rolls], PAD)
    seen = padded([[1] * len(r["prompt_ids"] + r["ids"]) for r in rolls], 0)
    made = net(input_ids=ids, attention_mask=seen, output_hidden_states=hidden, use_cache=False)
    scores = (made.logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    wide = max(len(r["ids"]) for r in rolls)
    heads = torch.tensor([len(r["prompt_ids"]) - 1 for r in rolls])
    places = (heads[:, None] + torch.arange(wide)).clamp(max=scores.shape[1] - 1)
    logps = scores.gather(1, places)
    return (logps, made.hidden_states[-1].gather(1, places[..., None].expand(-1, -1, 64))) if hidden else logps


@torch.no_grad()
def plain(net, roll, temperature):
    return forward(net, [roll], temperature)[0].tolist()


def near(text, answer):
    said = number(text)
    return 0.0 if said is None or len(said) > 6 else 1 / (1 + abs(int(said) - int(answer)) / 4)


class Loop:
    """GRPO with a mean over completions, to be changed by hooks."""

    prompts, G, limit, steps, temperature, lr, seed = 4, 4, 24, 8, 1.0, 5e-4, 23
    epochs = parts = 1
    low = high = 0.2
    beta = 0.0
    loss_type = "grpo"
    scale = "group"
    level = "token"

    def __init__(self, name):
        torch.manual_seed(self.seed)
        self.dice = random.Random(self.seed)
        self.net = self.build()
        self.sampler = self.net
        self.first = copy.deepcopy(self.net) if self.beta else None
        self.optimizer = self.optimizers()
        self.rows = self.data()
        self.count = self.step = 0
        file = HERE / "runs" / name / "run.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        self.file = Recorder(
            file, framework="own", settings=self.settings(), tokens={"eos": [END], "pad": PAD},
            data={"rows": len(self.rows), "distinct": len({r["prompt"] for r in self.rows})},
        )

    def build(self):
        return model().eval()

    def optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=0.0)

    def data(self):
        return sums(48, seed=9)

    def settings(self):
        return {
            "loss_type": self.loss_type, "scale_rewards": self.scale, "importance_sampling_level": self.level,
            "epsilon": self.low, "epsilon_high": self.high, "beta": self.beta, "temperature": self.temperature,
            "num_generations": self.G, "num_iterations": self.epochs, "max_completion_length": self.limit,
            "learning_rate": self.lr, "dtype": "float32",
        }

    # ---- what a rollout is

    def pick(self):
        return self.dice.sample(self.rows, self.prompts)

    def speak(self, rolls):
        for r, ids, said in zip(rolls, *sample(self.sampler, TOK, [r["prompt_ids"] for r in rolls], self.limit,
                                               self.temperature)):
            r["ids"], r["sampler_logprobs"] = ids, said

    def pay(self, r):
        return {"near": near(r["text"], r["row"]["answer"])}

    def advantages(self, paid):
        """(prompts, G) -> (prompts, G)."""
        return (paid - paid.mean(1, keepdim=True)) / (paid.std(1, keepdim=True) + 1e-4)

    def score(self, rolls):
        for r in rolls:
            r["text"] = TOK.decode(r["ids"], skip_special_tokens=True)
            r["rewards"] = self.pay(r)
            r["reward"] = sum(r["rewards"].values())
        for r, a in zip(rolls, self.advantages(torch.tensor([r["reward"] for r in rolls]).view(-1, self.G)).flatten()):
            r["advantage"] = a.item()

    def collect(self):
        rolls = [
            {"row": row, "prompt": row["prompt"], "prompt_ids": TOK(row["prompt"])["input_ids"], "group": g}
            for g, row in enumerate(self.pick()) for _ in range(self.G)
        ]
        self.speak(rolls)
        self.score(rolls)
        self.log(rolls)
        return rolls

    def log(self, rolls):
        for k, r in enumerate(rolls):
            r["at"] = (self.count, k)
        keep = ("prompt", "prompt_ids", "text", "ids", "group", "row", "rewards", "reward", "advantage",
                "sampler_logprobs")
        self.file.write(kind="rollout", number=self.count, step=self.step, completions=[
            {f: r[f] for f in keep if f in r} | self.recomputed(r) for r in rolls
        ])
        self.count += 1

    def recomputed(self, r):
        return {"model_logprobs": plain(self.sampler, r, self.temperature),
                "model_logprobs_at_1": plain(self.sampler, r, 1.0)}

    # ---- what an update is

    def prepare(self, rolls):
        with torch.no_grad():
            for r, lp in zip(rolls, forward(self.net, rolls, self.temperature)):
                r["old"] = lp[: len(r["ids"])].tolist()
            if self.first is not None:
                for r, lp in zip(rolls, forward(self.first, rolls, self.temperature)):
                    r["ref"] = lp[: len(r["ids"])].tolist()
        for r in rolls:
            r["tokens"] = [r["advantage"]] * len(r["ids"])
            r["mask"] = [1] * len(r["ids"])

    def masks(self, part, logps):
        return padded([r["mask"] for r in part], 0).float()

    def ratios(self, logps, old, mask):
        if self.level == "token":
            return (logps - old).exp()
        return (((logps - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(logps)

    def policy(self, ratio, adv):
        return -torch.min(ratio * adv, ratio.clamp(1 - self.low, 1 + self.high) * adv)

    def kl(self, logps, ref):
        return (ref - logps).exp() - (ref - logps) - 1

    def mean(self, losses, mask):
        if self.loss_type == "dapo":
            return (losses * mask).sum() / mask.sum()
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / len(losses)

    def loss(self, part, logps, mask):
        adv, old = padded([r["tokens"] for r in part]), padded([r["old"] for r in part])
        losses = self.policy(self.ratios(logps, old, mask), adv)
        if "weights" in part[0]:
            losses = losses * padded([r["weights"] for r in part])
        if self.beta:
            losses = losses + self.beta * self.kl(logps, padded([r["ref"] for r in part]))
        return self.mean(losses, mask)

    def beside(self, part, mask):
        """A loss that is not the policy's."""
        return 0.0

    def update(self, part, **more):
        logps = forward(self.net, part, self.temperature)
        logps.retain_grad()
        mask = self.masks(part, logps)
        loss = self.loss(part, logps, mask)
        self.optimizer.zero_grad()
        (loss + self.beside(part, mask)).backward()
        trained = [p for p in self.net.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, 1.0).item()
        before = [p.detach().clone() for p in trained]
        self.optimizer.step()
        moved = sum((a != b).sum().item() for a, b in zip(before, trained)) / sum(a.numel() for a in trained)
        rows = []
        for k, r in enumerate(part):
            T = len(r["ids"])
            rows.append({
                "rollout": r["at"][0], "completion": r["at"][1], "mask": [int(m) for m in mask[k, :T]],
                "logprobs": logps[k, :T].tolist(), "old_logprobs": r["old"],
                "advantage": r["tokens"] if len(set(r["tokens"])) > 1 else r["tokens"][0],
                "gradients": logps.grad[k, :T].tolist(), "after_logprobs": plain(self.net, r, self.temperature),
            } | self.row(r))
        self.file.write(kind="update", step=self.step, rows=rows, loss=loss.item(), grad_norm=norm,
                        learning_rate=self.lr, weights_changed=moved, **more)
        self.step += 1

    def row(self, r):
        more = {"corrections": r["weights"]} if "weights" in r else {}
        return more | ({"ref_logprobs": r["ref"]} if self.beta else {})

    def learn(self, rolls):
        for _ in range(self.epochs):
            self.dice.shuffle(rolls)
            size = len(rolls) // self.parts
            for at in range(0, size * self.parts, size):
                self.update(rolls[at : at + size])

    def deliver(self):
        """What the sampler gets before a rollout."""

    def run(self):
        for _ in range(self.steps):
            self.deliver()
            rolls = self.collect()
            self.prepare(rolls)
            self.learn(rolls)


class Whitened(Loop):
    """REINFORCE++: rewards are whitened over the whole batch."""

    scale, G, prompts = "batch", 2, 8
    loss_type = "dapo"

    def advantages(self, paid):
        return (paid - paid.mean()) / (paid.std() + 1e-4)


# ---- with a mistake ------------------------------------------------------------------------------


@case
class s31_sources_share_a_scale(Whitened):
    """Sources with rewards of 0 to 1 and 0 to 100 are whitened together: one pulls by its sheer name."""

    def data(self):
        return [{**r, "source": "percent" if k % 2 else "unit"} for k, r in enumerate(sums(48, seed=9))]

    def pay(self, r):
        return {"near": near(r["text"], r["row"]["answer"]) * (100 if r["row"]["source"] == "percent" else 1)}


@case
class s32_fine_counts_the_prompt(Loop):
    """DAPO's soft fine for long texts gets the length of prompt and completion: nearly each text is fined."""

    loss_type, high, buffer = "dapo", 0.28, 10

    def pay(self, r):
        over = len(r["prompt_ids"]) + len(r["ids"]) - (self.limit - self.buffer)
        return super().pay(r) | {"overlong": -min(1.0, max(0.0, over / self.buffer))}


class Expert(Loop):
    """Expert iteration: the best text of a group is trained like a demonstration."""

    steps, prompts, lr, floor = 10, 6, 2e-4, 0.99

    def pay(self, r):
        return {"right": float(number(r["text"]) == r["row"]["answer"])}

    def advantages(self, paid):
        best = torch.zeros_like(paid)
        best[torch.arange(len(paid)), paid.argmax(1)] = 1.0
        return best * (paid >= self.floor)

    def learn(self, rolls):
        chosen = [r for r in rolls if r["advantage"]]
        if chosen:
            self.update(chosen)


@case
class s33_best_of_the_wrong(Expert):
    """The best of four has no floor: where all are wrong, the first wrong text is taught as the best."""

    floor = -1.0


class Critic(Loop):
    """PPO with a critic on the trunk's states, lambda 1, values clipped around the old ones."""

    epochs, parts, lr, span, scale, G, prompts = 2, 2, 3e-4, 0.2, "none", 1, 16
    loss_type = "dapo"

    def build(self):
        net = super().build()
        net.critic = nn.Linear(64, 1)
        nn.init.normal_(net.critic.weight, std=0.05)
        nn.init.zeros_(net.critic.bias)
        return net

    def settings(self):
        return super().settings() | {"gamma": 1.0, "lam": 1.0, "cliprange_value": self.span, "vf_coef": 0.5}

    def advantages(self, paid):
        return paid

    def log(self, rolls):
        for r in rolls:
            del r["advantage"]  # it is the token's, and known after the critic
        super().log(rolls)
        for r in rolls:
            r["advantage"] = 0.0

    def prepare(self, rolls):
        super().prepare(rolls)
        with torch.no_grad():
            _, states = forward(self.net, rolls, self.temperature, hidden=True)
            values = self.net.critic(states)[..., 0]
        for r, v in zip(rolls, values):
            T = len(r["ids"])
            r["values"] = v[:T].tolist()
            r["returns"] = [r["reward"]] * T
            r["tokens"] = [g - x for g, x in zip(r["returns"], r["values"])]

    def beside(self, part, mask):
        _, states = forward(self.net, part, self.temperature, hidden=True)
        now = self.net.critic(states.detach())[..., 0]
        old, goal = padded([r["values"] for r in part]), padded([r["returns"] for r in part])
        near_old = old + (now - old).clamp(-self.span, self.span)
        worst = torch.max((now - goal) ** 2, (near_old - goal) ** 2)
        return 0.5 * 0.5 * (worst * mask).sum() / mask.sum()

    def row(self, r):
        return {"values": r["values"], "returns": r["returns"], "token_rewards": [0.0] * (len(r["ids"]) - 1) + [r["reward"]]}


@case
class s34_critic_not_in_the_optimizer(Critic):
    """The optimizer has the parameters of the policy's own modules: the critic's head never moves."""

    steps = 8

    def optimizers(self):
        body = [p for n, p in self.net.named_parameters() if not n.startswith("critic")]
        return torch.optim.AdamW(body, lr=self.lr, weight_decay=0.0)


class Masked(Loop):
    """GSPO, several minibatches; whole completions that went far and are bad are left out (as DeepSeek does)."""

    level, epochs, parts, low, high, far, lr = "sequence", 2, 2, 3e-3, 4e-3, 0.06, 5e-4

    def settings(self):
        return super().settings() | {"off_policy_mask_threshold": self.far}

    def gone(self, advantage, distance):
        return advantage < 0 and distance > self.far

    def masks(self, part, logps):
        mask = super().masks(part, logps)
        for k, r in enumerate(part):
            T = len(r["ids"])
            distance = (torch.tensor(r["old"]) - logps[k, :T].detach()).mean().item()
            if self.gone(r["advantage"], distance):
                mask[k] = 0
        return mask


@case
class s35_good_ones_are_masked(Masked):
    """The sequence mask has its sign turned: good texts that moved are left out, bad ones never."""

    def gone(self, advantage, distance):
        return advantage > 0 and -distance > self.far


@case
class s36_first_to_finish(Loop):
    """Eight are asked for each problem, and the four that end first are the batch: long ones are never trained."""

    G = 8

    def learn(self, rolls):
        rolls = sorted(rolls, key=lambda r: len(r["ids"]))
        seen, kept = Counter(), []
        for r in rolls:
            if seen[r["group"]] < 4:
                seen[r["group"]] += 1
                kept.append(r)
        self.update(kept)


class Low(nn.Module):
    """A linear layer with an adapter of rank 8."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(8, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 8))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)


class Adapter(Loop):
    """LoRA on queries and values by hand; the sampler gets merged weights."""

    lr = 3e-3

    def build(self):
        net = super().build()
        for p in net.parameters():
            p.requires_grad = False
        for layer in net.model.layers:
            layer.self_attn.q_proj = Low(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Low(layer.self_attn.v_proj)
        return net

    def optimizers(self):
        return torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.0)

    def merged(self, net):
        for module in net.modules():
            if isinstance(module, Low):
                module.base.weight.data += 2.0 * module.b.data @ module.a.data
        return net

    def deliver(self):
        self.sampler = self.merged(copy.deepcopy(self.net))
        for module in self.sampler.modules():
            if isinstance(module, Low):
                module.b.data.zero_()


@case
class s37_merged_and_kept(Adapter):
    """For the sampler the adapter is merged into the base in place, and never taken out again: it counts each time."""

    def deliver(self):
        self.sampler = copy.deepcopy(self.net)
        for module in self.sampler.modules():
            if isinstance(module, Low):
                module.base.weight.data += 2.0 * module.b.data @ module.a.data
                module.b.data.zero_()
        self.merged(self.net)


@case
class s38_pool_runs_dry(Loop):
    """A curriculum retires solved problems; any reward above 0 counts as solved, so soon one problem is left."""

    steps = 12

    def data(self):
        return sums(20, seed=9)

    def pick(self):
        self.pool = getattr(self, "pool", list(self.rows))
        while len(self.pool) < self.prompts:
            self.pool.append(self.rows[-1])
        return self.pool[: self.prompts]

    def collect(self):
        rolls = super().collect()
        solved = {r["prompt"] for r in rolls if r["reward"] > 0}
        self.pool = [row for row in self.pool if row["prompt"] not in solved]
        return rolls


@case
class s39_sampler_gets_the_average(Loop):
    """The engine is sent the moving average of the weights that is meant for evaluation."""

    steps, lr = 12, 1e-3

    def deliver(self):
        if self.sampler is self.net:
            self.sampler = copy.deepcopy(self.net)
        for slow, now in zip(self.sampler.parameters(), self.net.parameters()):
            slow.data.lerp_(now.data, 0.1)


@case
class s40_dual_clip_of_all(Loop):
    """Dual clip's lower bound c * A is taken for good texts, too, where it is the least: they have no gradient."""

    epochs, parts = 2, 2

    def settings(self):
        return super().settings() | {"clip_ratio_c": 3.0}

    def policy(self, ratio, adv):
        return torch.min(super().policy(ratio, adv), -3.0 * adv)


# ---- sound ---------------------------------------------------------------------------------------


@case
class n31_whitened_sources(Whitened):
    """Sound: REINFORCE++ over a mixture of two sources, rewards of one scale, a KL in the loss, hot."""

    beta, temperature, lr = 0.02, 1.1, 2e-4

    def data(self):
        easy = [{**r, "source": "easy"} for r in sums(24, seed=9)]
        chat = [
            {"prompt": f"<|im_start|>user\n{r['prompt'][:-3]}<|im_end|>\n<|im_start|>assistant\n", "answer": r["answer"],
             "source": "chat"} for r in sums(24, seed=10)
        ]
        return easy + chat

    def pay(self, r):
        if r["row"]["source"] == "chat":
            return {"reward": float(number(r["text"]) == r["row"]["answer"])}
        return {"reward": near(r["text"], r["row"]["answer"])}


@case
class n32_soft_fine(Loop):
    """Sound: DAPO with its soft fine for long texts, clip-higher, two minibatches."""

    loss_type, high, buffer, parts, limit = "dapo", 0.28, 5, 2, 12

    def pay(self, r):
        over = len(r["ids"]) - (self.limit - self.buffer)
        return super().pay(r) | {"overlong": -min(1.0, max(0.0, over / self.buffer))}


@case
class n33_expert_with_floor(Expert):
    """Sound: expert iteration, the best text of a group if it is right, from easy to hard problems."""

    def data(self):
        return sorted(sums(48, seed=9), key=lambda r: int(r["answer"]))

    def pick(self):
        at = self.count * 3
        return self.rows[at : at + self.prompts]


@case
class n34_value_clipping(Critic):
    """Sound: PPO without groups, values clipped around the old ones, two epochs of two minibatches."""


@case
class n35_far_bad_ones_masked(Masked):
    """Sound: GSPO whose bad completions that went far are left out, as of DeepSeek V3.2."""


@case
class n36_continued(Loop):
    """Sound: texts are cut after four tokens and continued in the next step by newer weights; the ratio begins at
    what the sampler said, token by token."""

    steps, loss_type, chunk = 12, "dapo", 4

    def settings(self):
        return super().settings() | {"partial_rollout": True}

    def collect(self):
        waiting = getattr(self, "waiting", [])
        self.clock = getattr(self, "clock", 0) + 1
        fresh = [
            {"row": row, "prompt": row["prompt"], "prompt_ids": TOK(row["prompt"])["input_ids"], "ids": [],
             "sampler_logprobs": [], "name": (self.clock, g)}
            for g, row in enumerate(self.pick()) for _ in range(self.G)
        ]
        rolls = waiting + fresh
        live = [r for r in rolls if not r["ids"] or (r["ids"][-1] != END and len(r["ids"]) < self.limit)]
        for r, ids, said in zip(live, *sample(self.net, TOK, [r["prompt_ids"] + r["ids"] for r in live], self.chunk)):
            r["ids"], r["sampler_logprobs"] = (r["ids"] + ids)[: self.limit], (r["sampler_logprobs"] + said)[: self.limit]
        open_ones = {r["name"] for r in rolls if r["ids"][-1] != END and len(r["ids"]) < self.limit}
        self.waiting = [r for r in rolls if r["name"] in open_ones]
        ready = [r for r in rolls if r["name"] not in open_ones]
        names = sorted({r["name"] for r in ready})
        for r in ready:
            r["group"] = names.index(r["name"])
        ready.sort(key=lambda r: r["group"])
        if ready:
            self.score(ready)
            self.log(ready)
        return ready

    def recomputed(self, r):
        return {}

    def prepare(self, rolls):
        if rolls:
            super().prepare(rolls)
        for r in rolls:
            r["old"] = r["sampler_logprobs"]

    def learn(self, rolls):
        if rolls:
            super().learn(rolls)


@case
class n37_adapter_merged(Adapter):
    """Sound: LoRA by hand, the sampler has a merged copy, two epochs."""

    epochs = 2


if __name__ == "__main__":
    for name, run in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            run(name).run()
            print(name, flush=True)
