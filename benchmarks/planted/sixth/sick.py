"""One realistic mistake each. `RUNS`: name -> a `Loop`, or a function that writes a dump or a log."""

import copy
import csv
import json
import random
import re

import torch
from loop import EOS, Loop, decode, encode, sums


class TiledGroups(Loop):
    """Prompts are tiled (p0 p1 p2 p3 p0 ...), rewards are viewed as (prompts, G): a group mixes problems."""

    def rollout(self, iteration):
        rows = super().rollout(iteration)
        return [
            rows[place * self.group + copy_] for copy_ in range(self.group) for place in range(self.prompts)
        ]

    def write_rollout(self, completions):
        for place, completion in enumerate(completions):
            completion["group"] = self.number * self.prompts + place // self.group
        super().write_rollout(completions)


class BroadcastAdvantage(Loop):
    """Sequence loss (N,) meets advantages (N, 1): the product is (N, N)."""

    loss_type = "grpo"

    def loss(self, batch):
        mask = batch["mask"]
        ratio = (self.ratio(batch) * mask).sum(1) / mask.sum(1)
        advantage = batch["advantage"]
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


class UndetachedOld(Loop):
    """Old log-probs are the trained ones without detach, so the ratio has no gradient; only the KL trains."""

    beta = 0.05

    def ratio(self, batch):
        batch["old"] = batch["logprobs"]
        return super().ratio(batch)


class RewardsUnordered(Loop):
    """A pool's imap_unordered returns the scores as they finish; long answers finish last."""

    def score(self, completions):
        super().score(completions)
        finished = sorted(completions, key=lambda completion: len(completion["ids"]) + random.random())
        scores = [completion["rewards"] for completion in finished]
        for completion, rewards in zip(completions, scores, strict=True):
            completion["rewards"] = rewards
        self.total(completions)


class RewardsShifted(Loop):
    """The answer of the previous request is read: each score lies one row too low."""

    def score(self, completions):
        super().score(completions)
        scores = [completion["rewards"] for completion in completions]
        for place, completion in enumerate(completions):
            completion["rewards"] = scores[place - 1]
        self.total(completions)


class RewardCache(Loop):
    """Scores are cached by the completion's text, without the problem."""

    iterations = 8
    known: dict = {}

    def rewards(self, completion):
        return self.known.setdefault(completion["text"], super().rewards(completion))


class FirstNumber(Loop):
    """The answer is the first number of the text; the model writes the sum again first: 3+4=7."""

    def setup(self):
        adam = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        rng = random.Random(2)
        for _ in range(60):
            row = sums(rng, 0)
            ids = torch.tensor([[1, *encode(row["prompt"] + row["prompt"] + row["answer"]), EOS]])
            loss = self.model(ids, labels=ids).loss
            adam.zero_grad()
            loss.backward()
            adam.step()

    max_tokens = 10

    def rewards(self, completion):
        numbers = re.findall(r"\d+", completion["text"])
        return {
            "right": float(bool(numbers) and abs(int(numbers[0]) - int(completion["row"]["answer"])) < 20)
        }


class RewardReadsPrompt(Loop):
    """The format's reward looks for tags in prompt + completion; the instruction has them."""

    lead = "write <a>n. "

    def rewards(self, completion):
        whole = completion["prompt"] + completion["text"]
        return super().rewards(completion) | {"format": float("<a>" in whole)}


class EosAppended(Loop):
    """An end token is appended to truncated completions, and trained."""

    max_tokens = 2

    def complete(self, problem, group):
        completion = super().complete(problem, group)
        if completion["truncated"]:
            completion["ids"].append(EOS)
            completion["mask"].append(1)
            completion["sampler_logprobs"].append(None)
        return completion


class Retokenised(Loop):
    """Texts are decoded, stripped and tokenised again for training: the end token is lost, digits shift."""

    def train(self, completions):
        for completion in completions:
            completion["ids"] = encode(completion["text"].strip())[:-1] + [encode(" ")[0]]
            completion["mask"] = [1] * len(completion["ids"])
        super().train(completions)

    def write_update(self, batch, completions, places, loss, norm, rate):
        self.now = completions
        super().write_update(batch, completions, places, loss, norm, rate)

    def write(self, line):
        if line["kind"] == "update":
            for row, completion in zip(line["rows"], self.now, strict=True):
                row["ids"] = completion["ids"]
        super().write(line)


class MeanOverPadding(Loop):
    """loss.mean() over (N, T): padding is in the denominator."""

    header = {"loss_type": "bnpo"}

    def reduce(self, loss, mask, batch):
        return (loss * mask).mean()


class SequenceSum(Loop):
    """GSPO's ratio is the product over the tokens, without the length's root."""

    level = "sequence"
    epochs, minibatches = 2, 2

    def ratio(self, batch):
        return ((batch["logprobs"] - batch["old"]) * batch["mask"]).sum(1, keepdim=True).exp()


class WhitenWithPads(Loop):
    """REINFORCE++: advantages are whitened over (N, T) with the padding's zeros."""

    scale = "none"

    def prepare(self, completions):
        batch = super().prepare(completions)
        wide = batch["advantage"] * batch["mask"]
        batch["advantage"] = (wide - wide.mean()) / (wide.std() + 1e-8)
        return batch


class GaeOffByOne(Loop):
    """delta = r + gamma * V[t] - V[t]: the next value is the same place's."""

    critic = True
    header = {"gamma": 1.0, "lam": 0.95}

    def gae(self, rewards, values, mask):
        advantages, last = torch.zeros_like(values), 0.0
        for place in reversed(range(values.shape[1])):
            delta = rewards[:, place] + self.gamma * values[:, place] - values[:, place]
            last = delta + self.gamma * self.lam * last
            advantages[:, place] = last
        return advantages * mask


class AdapterIsReference(Loop):
    """LoRA: the reference's forward pass forgets disable_adapter, so the KL is 0."""

    beta = 0.05
    lr = 3e-3

    def setup(self):
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(
            self.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=32)
        )

    def sync(self):
        self.sampler.load_state_dict(self.model.state_dict())

    def reference_logprobs(self, completions):
        return self.logprobs(self.model, completions)


class ReferenceAtResume(Loop):
    """After a restart the reference is loaded from the checkpoint: the KL falls to 0 in the middle."""

    beta = 0.05
    lr = 3e-3
    iterations = 6

    def rollout(self, iteration):
        if iteration == 3:
            self.reference = copy.deepcopy(self.model)
        return super().rollout(iteration)


class ReferenceEma(Loop):
    """An average of the weights, meant for evaluation, is the reference's module, too."""

    beta = 0.05
    lr = 3e-3
    iterations = 6

    def sync(self):
        super().sync()
        with torch.no_grad():
            for old, new in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                old.lerp_(new, 0.5)


class MicroSum(Loop):
    """Micro-batches' means are added without dividing by their number."""

    micros = 4

    def loss(self, batch):
        return super().loss(batch) * self.micros


class ZeroGradAmongMicros(Loop):
    """zero_grad stands in the loop over micro-batches: only the last one trains."""

    micros = 4
    max_grad_norm = 100.0

    def trained_logprobs(self, completions, batch):
        self.adam.zero_grad()
        return super().trained_logprobs(completions, batch)


class PermutedAdvantages(Loop):
    """Mini-batches shuffle the completions, not their advantages."""

    minibatches = 2

    def update(self, batch, completions, places):
        lost = [completion["advantage"] for completion in self.whole[: len(places)]]
        super().update(batch | {"advantage": torch.tensor(lost)[:, None]}, completions, places)

    def train(self, completions):
        self.whole = completions
        super().train(completions)


class SeededEachRollout(Loop):
    """torch.manual_seed(42) at the top of generate(): a group's completions draw the same numbers."""

    def complete(self, problem, group):
        torch.manual_seed(42)
        return super().complete(problem, group)


class LeftWithoutPositions(Loop):
    """Training pads on the left and gives no attention mask: what is learned is not what was sampled."""

    left = True

    def problems(self, iteration):
        rows = super().problems(iteration)
        rows[0] = {"prompt": "12+3+4+20=", "answer": "39", "id": 99}
        return rows

    def forward(self, model, ids):
        return model(ids)


class ReferenceAtOne(Loop):
    """The policy's logits are divided by the temperature, the reference's are not."""

    beta = 0.05
    temperature = 0.7

    def reference_logprobs(self, completions):
        kept, self.temperature = self.temperature, 1.0
        result = super().reference_logprobs(completions)
        self.temperature = kept
        return result


class OnlyClipped(Loop):
    """The loss is clip(ratio) * advantage, without the minimum."""

    epochs = 4
    lr = 3e-3
    max_grad_norm = 10.0

    def policy(self, batch):
        return -self.ratio(batch).clamp(0.8, 1.2) * batch["advantage"]


class KlPaid(Loop):
    """The KL in the reward has the wrong sign: distance is paid."""

    scale = "none"
    lr = 3e-3
    header = {"beta": 0.1}

    def score(self, completions):
        super().score(completions)
        with torch.no_grad():
            gap = self.logprobs(self.model, completions) - self.logprobs(self.reference, completions)
        for completion, row in zip(completions, gap, strict=True):
            completion["kl"] = row[: len(completion["ids"])].tolist()
            completion["reward"] += 0.1 * float(row.sum())

    def write_update(self, batch, completions, places, loss, norm, rate):
        with torch.no_grad():
            batch["ref"] = self.logprobs(self.reference, completions)
        super().write_update(batch, completions, places, loss, norm, rate)

    def write(self, line):
        if line["kind"] == "update":
            for row in line["rows"]:
                row["kl"] = [new - old for new, old in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
        super().write(line)


class ScheduleTooFast(Loop):
    """The scheduler steps with each micro-batch: the learning rate is 0 after a quarter of the run."""

    iterations = 8
    micros = 4
    header = {"max_steps": 8, "lr_scheduler_type": "linear", "warmup_steps": 0}

    def scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: max(0.0, 1 - step / 8))

    def update(self, *args):
        super().update(*args)
        for _ in range(self.micros - 1):
            self.schedule.step()


class NoEpsilon(Loop):
    """A judge's scores are equal but for rounding; divided by their std without epsilon they count fully."""

    def rewards(self, completion):
        text = completion["text"]
        return {"judge": 0.5 + 1e-6 * (sum(map(ord, text)) % 7)}

    def advantages(self, completions):
        rewards = torch.tensor([completion["reward"] for completion in completions]).view(-1, self.group)
        return (
            ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).nan_to_num().flatten()
        )


class StaleSampler(Loop):
    """vLLM keeps the first weights; old log-probs are the trainer's, nothing corrects."""

    sync_every = 100
    lr = 3e-3
    iterations = 5


class TopP(Loop):
    """top_p=0.8 while sampling; the sampler's log-probs are of the cut distribution."""

    header = {"top_p": 0.8}

    def probabilities(self, logits):
        p = super().probabilities(logits)
        ordered, places = p.sort(descending=True)
        ordered[(ordered.cumsum(0) - ordered) > 0.8] = 0
        p = torch.zeros_like(p).scatter(0, places, ordered)
        return p / p.sum()

    def setup(self):
        self.leave_out = ("model_logprobs", "model_logprobs_at_1")


class RlooByN(Loop):
    """RLOO: the baseline's sum is divided by n, not by n - 1, and holds only the others."""

    scale = "none"
    header = {"loss_type": "rloo"}

    def advantages(self, completions):
        r = torch.tensor([completion["reward"] for completion in completions]).view(-1, self.group)
        return (r - (r.sum(1, keepdim=True) - r) / self.group).flatten()


class LoraScale(Loop):
    """The sampler's server merges LoRA with alpha / r of another config (scale 1, not 8)."""

    lr = 3e-3

    def setup(self):
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(
            self.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=32)
        )

    def sync(self):
        self.sampler.load_state_dict(self.model.state_dict())
        for module in self.sampler.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = dict.fromkeys(module.scaling, 1.0)


class PositiveOnly(Loop):
    """advantages.clamp(min=0) is left from an experiment; the settings say GRPO."""

    def advantages(self, completions):
        return super().advantages(completions).clamp(min=0)


class DropoutOn(Loop):
    """model.train() with dropout, so that old and new log-probs differ before the first step."""

    model_name = "gpt2_dropout"

    def train(self, completions):
        self.model.train()
        super().train(completions)


class NanScores(Loop):
    """A judge's time-out is NaN, and nanmean's baseline keeps it; nan_to_num pays it the middle, 0."""

    def rewards(self, completion):
        slow = len(completion["ids"]) > 3
        return {"judge": float("nan") if slow else super().rewards(completion)["right"]}

    def advantages(self, completions):
        r = (
            torch.tensor([completion["reward"] for completion in completions])
            .view(-1, self.group)
            .nan_to_num(0)
        )
        return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


# --- several turns ---------------------------------------------------------------------------------------------------


class ToolMaskShifted(Loop):
    """The mask of a tool's tokens lies one place too far right."""

    tools = True

    def complete(self, problem, group):
        completion = super().complete(problem, group)
        completion["mask"] = [1, *completion["mask"][:-1]]
        return completion


class ToolAnswersSwapped(Loop):
    """The batch's calls run together, and the answers come back in another order."""

    tools = True
    queue: list = []

    def tool(self, text):
        answer = super().tool(text)
        self.queue.append(answer)
        return self.queue.pop(0) if len(self.queue) > 3 else "0"


class TurnsShareBaseline(Loop):
    """Each turn is a sample of its own with the episode's reward; groups of the batch's rows mix first turns."""

    tools = True
    scale = "none"

    def rollout(self, iteration):
        rows = []
        for completion in super().rollout(iteration):
            end = next(
                (
                    p + 1
                    for p, flag in enumerate(completion["inserted"])
                    if not flag and completion["ids"][p] == encode(">")[0]
                ),
                None,
            )
            completion["whole"] = completion["text"]
            if end is None:
                rows.append(completion)
                continue
            later = (
                completion["inserted"].index(0, end)
                if 0 in completion["inserted"][end:]
                else len(completion["ids"])
            )
            first, second = copy.deepcopy(completion), copy.deepcopy(completion)
            for part, low, high in ((first, 0, end), (second, later, len(completion["ids"]))):
                for key in ("ids", "sampler_logprobs", "inserted", "mask"):
                    part[key] = completion[key][low:high]
                part["text"] = decode(part["ids"])
            second["prompt_ids"] = completion["prompt_ids"] + completion["ids"][:later]
            second["prompt"] = completion["prompt"] + decode(completion["ids"][:later])
            rows += [first, second] if second["ids"] else [first]
        return rows[: len(rows) // self.group * self.group]

    def rewards(self, completion):
        return super().rewards(completion | {"text": completion["whole"]})

    def write_rollout(self, completions):
        for place, completion in enumerate(completions):
            completion["group"] = self.number * 100 + place // self.group
        super().write_rollout(completions)


class ToolTokensHaveNoMaskInKl(Loop):
    """The policy's loss masks the tool's tokens, the mask written for the KL and the mean does not."""

    tools = True
    beta = 0.05

    def complete(self, problem, group):
        completion = super().complete(problem, group)
        completion["mask"] = [1] * len(completion["mask"])
        return completion


# --- verl's dumps ----------------------------------------------------------------------------------------------------


def dump(path, change, steps=3, prompts=8, group=4):
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    rng = random.Random(4)
    for step in range(1, steps + 1):
        lines = []
        for _ in range(prompts):
            a, b = rng.randrange(900), rng.randrange(900)
            for _ in range(group):
                guess = a + b if rng.random() < 0.5 else a + b + rng.randrange(1, 9)
                lines.append({
                    "input": f"user\nWhat is {a} + {b}? Write #### and the answer.\nassistant\n",
                    "output": f"I add {a} and {b}.\n#### {guess}", "gts": str(a + b),
                    "score": float(guess == a + b), "step": step,
                })  # fmt: skip
        change(lines)
        (folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def verl_shifted(path):
    """verl's dump: the scores lie one row too low"""

    def change(lines):
        scores = [line["score"] for line in lines]
        for place, line in enumerate(lines):
            line["score"] = scores[place - 1]

    return dump(path, change)


def verl_commas(path):
    """verl's dump: the model writes 1,234, the verifier reads 1: correct answers get 0"""

    def change(lines):
        for line in lines:
            text, guess = line["output"].split("#### ")
            line["output"] = f"{text}#### {int(guess):,}"
            line["score"] = line["score"] if int(guess) < 1000 else 0.0

    return dump(path, change)


def verl_leak(path):
    """verl's dump: the prompt has the answer (a column of the data's solution is joined to it)"""

    def change(lines):
        for line in lines:
            line["input"] = line["input"].replace("?", f"? (reference: {line['gts']})")

    return dump(path, change)


# --- logs ------------------------------------------------------------------------------------------------------------


def table(path, rows):
    path = path.with_suffix(".csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def verl_row(step, rng):
    return {
        "_step": step, "critic/rewards/mean": 0.3 + 0.005 * step + rng.gauss(0, 0.02), "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0, "critic/score/mean": 0.3 + 0.005 * step + rng.gauss(0, 0.02),
        "actor/pg_loss": rng.gauss(0, 0.01), "actor/pg_clipfrac": abs(rng.gauss(0.002, 0.001)),
        "actor/ppo_kl": abs(rng.gauss(0, 0.0005)), "actor/grad_norm": 0.2 + abs(rng.gauss(0, 0.03)),
        "actor/lr": 1e-6, "actor/entropy": 0.4 - 0.001 * step + rng.gauss(0, 0.005),
        "response_length/mean": 300 + rng.gauss(0, 10), "response_length/clip_ratio": 0.03,
        "actor/kl_loss": 0.0005 * step, "training/global_step": step,
    }  # fmt: skip


def wandb_clip(path):
    """wandb of verl: 60 % of tokens are clipped and ppo_kl is 0.8, as old log-probs are of another model"""
    rng = random.Random(5)
    return table(
        path,
        [
            verl_row(s, rng) | {"actor/pg_clipfrac": 0.6 + rng.gauss(0, 0.02), "actor/ppo_kl": 0.8}
            for s in range(1, 41)
        ],
    )


def wandb_lr(path):
    """wandb of verl: total_training_steps=10 of another run, the learning rate is 0 from step 10 on"""
    rng = random.Random(6)
    return table(path, [verl_row(s, rng) | {"actor/lr": 1e-6 * max(0.0, 1 - s / 10)} for s in range(1, 41)])


def trl_history(path, rows):
    path = path.with_suffix("")
    path.mkdir(exist_ok=True)
    state = {
        "global_step": len(rows),
        "max_steps": len(rows),
        "log_history": rows,
        "logging_steps": 1,
        "epoch": 1.0,
    }
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


def trl_row(step, rng):
    return {
        "step": step, "epoch": step / 50, "loss": rng.gauss(0, 0.002), "grad_norm": 0.2 + abs(rng.gauss(0, 0.05)),
        "learning_rate": 1e-6, "num_tokens": 9000 * step, "completions/mean_length": 180 + rng.gauss(0, 8),
        "completions/clipped_ratio": 0.02, "rewards/correct/mean": 0.3 + 0.004 * step + rng.gauss(0, 0.02),
        "rewards/correct/std": 0.4, "reward": 0.3 + 0.004 * step + rng.gauss(0, 0.02), "reward_std": 0.3,
        "frac_reward_zero_std": 0.2, "entropy": 0.5 - 0.001 * step, "clip_ratio/region_mean": 0.0,
    }  # fmt: skip


def trl_kl(path):
    """trainer_state: the KL is large at the first step (2.3): another reference than the start"""
    rng = random.Random(7)
    return trl_history(path, [trl_row(s, rng) | {"kl": 2.3 + rng.gauss(0, 0.05)} for s in range(1, 41)])


def trl_format(path):
    """trainer_state: the reward of the format is 0 with std 0 in each step: its pattern never matches"""
    rng = random.Random(8)
    rows = [trl_row(s, rng) | {"rewards/format/mean": 0.0, "rewards/format/std": 0.0} for s in range(1, 41)]
    return trl_history(path, rows)


RUNS = {
    name: run
    for name, run in vars().items()
    if isinstance(run, type) and issubclass(run, Loop) and run is not Loop
}
RUNS |= {
    run.__name__: run
    for run in (verl_shifted, verl_commas, verl_leak, wandb_clip, wandb_lr, trl_kl, trl_format)
}
