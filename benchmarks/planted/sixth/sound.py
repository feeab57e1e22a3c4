"""Sound runs: other models, algorithms, tasks and unusual legal choices."""

import random

import torch
from loop import Loop
from sick import dump, table, trl_history, trl_row, verl_row


class DrGrpoGpt2(Loop):
    """Dr. GRPO on GPT-2, no std, constant length."""

    model_name = "gpt2"
    loss_type, scale = "dr_grpo", "none"


class DapoQwen(Loop):
    """Token mean, clip-higher, dead groups are filtered, two epochs of two mini-batches."""

    model_name = "qwen"
    loss_type, epsilon_high, epochs, minibatches = "bnpo", 0.28, 2, 2
    header = {"loss_type": "dapo"}

    def filter(self, completions):
        kept = []
        for start in range(0, len(completions), self.group):
            group = completions[start : start + self.group]
            if len({self.rewards(completion)["right"] for completion in group}) > 1:
                kept += group
        return kept or completions


class RlooPairs(Loop):
    """RLOO with groups of two, rewards of -1 and 1."""

    group, prompts, scale, seed = 2, 8, "none", 5
    header = {"loss_type": "rloo"}

    def rewards(self, completion):
        return {"judge": 2.0 * (super().rewards(completion)["right"] > 0) - 1}

    def advantages(self, completions):
        r = torch.tensor([completion["reward"] for completion in completions]).view(-1, self.group)
        return (r - (r.sum(1, keepdim=True) - r) / (self.group - 1)).flatten()


class OnePrompt(Loop):
    """One prompt per step, sixteen completions, warm-up of the learning rate from 0."""

    prompts, group, iterations = 1, 16, 8
    header = {"warmup_steps": 4, "max_steps": 8}

    def scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: min(1.0, step / 4))


class LoraKl(Loop):
    """LoRA; the reference is the model without the adapter; k3 in the loss."""

    beta, lr = 0.04, 3e-3

    def setup(self):
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(
            self.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=32)
        )

    def reference_logprobs(self, completions):
        with self.model.disable_adapter():
            return self.logprobs(self.model, completions)


class Accumulated(Loop):
    """Four micro-batches of a per-sequence mean, temperature 0.7 with matching log-probs, padding on the left."""

    micros, temperature, left, seed = 4, 0.7, True, 3


class SeveralRewards(Loop):
    """Three rewards with weights, one a penalty; groups of eight; long prompts."""

    lead = "you are a careful clerk. add both numbers and write the sum, no words. "
    group, weights, beta = 8, [1.0, 0.5, 0.1], 0.02

    def rewards(self, completion):
        text = completion["text"]
        return super().rewards(completion) | {"digits": float(text.isdigit()), "length": -float(len(text))}


class AsyncCorrected(Loop):
    """The sampler is two iterations behind; truncated importance weights correct it."""

    sync_every, lr, iterations, seed = 2, 2e-3, 6, 8
    header = {"importance_sampling_correction": True, "importance_sampling_cap": 2.0}

    def prepare(self, completions):
        batch = super().prepare(completions)
        sampler = self.pad([completion["sampler_logprobs"] for completion in completions])
        batch["corrections"] = ((batch["old"] - sampler).exp() * batch["mask"]).clamp(max=2.0)
        return batch


class AsyncSamplerIsOld(Loop):
    """The sampler is behind; old log-probs are the sampler's own, so the ratio corrects."""

    sync_every, lr, iterations, seed = 2, 2e-3, 6, 9

    def old_logprobs(self, completions):
        return self.pad([completion["sampler_logprobs"] for completion in completions])


class PpoCritic(Loop):
    """PPO with a critic, GAE, whitened, two epochs."""

    critic, epochs, minibatches, loss_type, scale = True, 2, 2, "bnpo", "none"
    header = {"gamma": 1.0, "lam": 0.95}


class Gspo(Loop):
    """GSPO: the sequence's ratio with length's root, small clips, two mini-batches."""

    level, epsilon, epsilon_high, minibatches = "sequence", 3e-4, 4e-4, 2


class ReinforcePlusPlus(Loop):
    """REINFORCE++: advantages are whitened over the batch's tokens, no baseline of groups."""

    scale, group, prompts = "none", 1, 16
    header = {"num_generations": 1, "algorithm": "reinforce++"}

    def advantages(self, completions):
        return torch.tensor([completion["reward"] for completion in completions])

    def prepare(self, completions):
        batch = super().prepare(completions)
        batch["advantage"] = self.whiten(batch["advantage"] * batch["mask"], batch["mask"])
        return batch


class RunningMean(Loop):
    """REINFORCE with a running mean of rewards as baseline, one completion per prompt."""

    scale, group, prompts, iterations, mean = "none", 1, 16, 6, 0.0

    def advantages(self, completions):
        r = torch.tensor([completion["reward"] for completion in completions])
        self.mean, old = 0.8 * self.mean + 0.2 * float(r.mean()), self.mean
        return r - old


class Cispo(Loop):
    """CISPO: the clipped ratio is a weight of the log-prob."""

    epochs, minibatches, epsilon, epsilon_high = 2, 2, 1.0, 4.0
    header = {"loss_type": "cispo"}
    loss_type = "bnpo"

    def policy(self, batch):
        weight = (batch["logprobs"] - batch["old"]).exp().clamp(max=5.0).detach()
        return -weight * batch["advantage"] * batch["logprobs"]


class TruncatedMasked(Loop):
    """DAPO's overlong filter: truncated completions have an empty mask."""

    max_tokens, loss_type = 3, "bnpo"
    header = {"mask_truncated_completions": True, "loss_type": "dapo"}

    def prepare(self, completions):
        for completion in completions:
            if completion["truncated"]:
                completion["mask"] = [0] * len(completion["ids"])
        return super().prepare(completions)


class Moe(Loop):
    """A mixture of experts, groups scaled by the batch's std."""

    model_name, scale = "moe", "batch"


class ToolRun(Loop):
    """Calls of a tool, with its tokens outside the loss, and a KL."""

    tools, beta, group = True, 0.02, 6


class TurnRewards(Loop):
    """Tool run with a bonus for a call, and an advantage per token: the first turn gets the call's, too."""

    tools, scale = True, "none"

    def rewards(self, completion):
        return super().rewards(completion) | {"call": 0.2 * ("error" not in completion["text"])}

    def prepare(self, completions):
        batch = super().prepare(completions)
        calls = torch.tensor([completion["rewards"]["call"] for completion in completions])
        calls = (calls.view(-1, self.group) - calls.view(-1, self.group).mean(1, keepdim=True)).flatten()
        wide = batch["advantage"].expand_as(batch["mask"]).clone()
        for row, completion in enumerate(completions):
            end = completion["inserted"].index(1) if 1 in completion["inserted"] else 0
            wide[row, :end] += 0.5 * calls[row]
        batch["advantage"] = wide
        return batch


class NoisyJudge(Loop):
    """A model judges with temperature: equal texts may have different scores."""

    group, scale = 8, "group"

    def rewards(self, completion):
        value = super().rewards(completion)["right"]
        return {"judge": round(min(1.0, max(0.0, value + random.gauss(0, 0.2))), 1)}


class LabelsNoise(Loop):
    """A tenth of verdicts is flipped on purpose (an experiment on noise), G = 6."""

    group, header = 6, {"label_noise": 0.1}

    def rewards(self, completion):
        right = super().rewards(completion)["right"] > 1
        return {"noisy": float(right != (random.random() < 0.1))}


class EmaReference(Loop):
    """The reference follows the policy, as the settings say (sync_ref_model)."""

    beta, lr, iterations = 0.05, 3e-3, 6
    header = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}

    def sync(self):
        super().sync()
        with torch.no_grad():
            for old, new in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                old.lerp_(new, 0.5)


class KlInReward(Loop):
    """k1 is taken from the reward of each token, as InstructGPT; RLOO over the sums."""

    scale, lr, iterations = "none", 3e-3, 5
    header = {"beta": 0.05, "kl_in_reward": True}

    def score(self, completions):
        super().score(completions)
        with torch.no_grad():
            gap = self.logprobs(self.model, completions) - self.logprobs(self.reference, completions)
        for completion, row in zip(completions, gap, strict=True):
            completion["reward"] -= 0.05 * float(row.sum())

    def advantages(self, completions):
        r = torch.tensor([completion["reward"] for completion in completions]).view(-1, self.group)
        return (r - (r.sum(1, keepdim=True) - r) / (self.group - 1)).flatten()


class ExpertIteration(Loop):
    """Expert iteration: the best completion of a group is trained with weight 1, the others with 0."""

    scale = "none"
    header = {"algorithm": "expert_iteration"}

    def advantages(self, completions):
        result = []
        for start in range(0, len(completions), self.group):
            group = [completion["reward"] for completion in completions[start : start + self.group]]
            result += [float(place == group.index(max(group))) for place in range(self.group)]
        return torch.tensor(result)


class LengthTask(Loop):
    """The reward is near a length; equal rewards are frequent; high temperature 1.3; few fields are written."""

    temperature, group = 1.3, 5
    leave_out = ("model_logprobs", "model_logprobs_at_1", "after_logprobs", "prompt_ids", "row")

    def rewards(self, completion):
        return {"near": -abs(len(completion["text"]) - 3) / 3}


class FewAnswers(Loop):
    """Few different texts and answers, G = 8, all rows appear twice in two epochs of the data."""

    group, prompts, iterations, rows = 8, 4, 6, 12

    def dataset(self):
        rows = super().dataset()
        return [
            {"prompt": row["prompt"], "answer": str(int(row["answer"]) % 10), "id": row["id"]} for row in rows
        ]

    def rewards(self, completion):
        return {"last": float(completion["text"][-1:] == completion["row"]["answer"])}


class TopKExact(Loop):
    """top_k keeps all tokens; the sampler's rounding noise (bf16) is in its log-probs; groups of 3."""

    group = 3

    def complete(self, problem, group):
        completion = super().complete(problem, group)
        completion["sampler_logprobs"] = [p + random.gauss(0, 0.004) for p in completion["sampler_logprobs"]]
        return completion


class PrefixForced(Loop):
    """Each prompt ends with the answer's start, '1'; only what follows is sampled."""

    def dataset(self):
        return [
            row | {"prompt": row["prompt"] + row["answer"][:1], "answer": row["answer"][1:]}
            for row in super().dataset()
            if len(row["answer"]) > 1
        ]


class LowLearning(Loop):
    """A learning rate of 1e-6 in fp32, adam's epsilon 1e-15, no clipping of the norm, no rewards' names."""

    lr, max_grad_norm = 1e-6, 1e9

    def rewards(self, completion):
        return {"reward": super().rewards(completion)["right"] * 10 - 3}


def verl_sound(path):
    """verl's dump"""
    return dump(path, lambda lines: None)


def verl_judge(path):
    """verl's dump with a continuous judge, and no gts"""

    def change(lines):
        for line in lines:
            del line["gts"]
            line["score"] = round(random.random(), 2)

    return dump(path, change)


def wandb_sound(path):
    """wandb of verl"""
    rng = random.Random(15)
    return table(path, [verl_row(s, rng) for s in range(1, 41)])


def wandb_warm(path):
    """wandb of verl with warm-up from 0 over 10 steps and cosine to 0"""
    rng = random.Random(16)
    return table(
        path, [verl_row(s, rng) | {"actor/lr": 1e-6 * min(s / 10, (40 - s) / 30)} for s in range(41)]
    )


def trl_sound(path):
    """trainer_state of GRPO with a KL, last line is the summary"""
    rng = random.Random(17)
    rows = [trl_row(s, rng) | {"kl": 0.001 * s} for s in range(1, 41)]
    return trl_history(path, [*rows, {"step": 40, "epoch": 1.0, "train_loss": 0.001, "train_runtime": 900.0}])


def trl_sft(path):
    """trainer_state of SFT: no rewards"""
    rng = random.Random(18)
    rows = [{"step": s, "epoch": s / 40, "loss": 2 / s**0.3, "grad_norm": 1 + rng.random(), "learning_rate": 2e-5 * (1 - s / 40),
             "mean_token_accuracy": 0.5 + s / 100, "num_tokens": 900 * s, "entropy": 1.5 / s**0.3} for s in range(1, 41)]  # fmt: skip
    return trl_history(path, rows)


def trl_dpo(path):
    """trainer_state of DPO: rewards/chosen and rejected, both fall, their margin grows"""
    rng = random.Random(19)
    rows = [{"step": s, "epoch": s / 40, "loss": 0.69 / s**0.2, "grad_norm": 3 + rng.random(), "learning_rate": 5e-7,
             "rewards/chosen": -0.02 * s, "rewards/rejected": -0.06 * s, "rewards/margins": 0.04 * s,
             "rewards/accuracies": 0.5 + s / 100, "logps/chosen": -200.0 - s, "logps/rejected": -220.0 - 3 * s,
             "logits/chosen": -1.0, "logits/rejected": -1.1} for s in range(1, 41)]  # fmt: skip
    return trl_history(path, rows)


RUNS = {
    name: run
    for name, run in vars().items()
    if isinstance(run, type) and issubclass(run, Loop) and run is not Loop
}
RUNS |= {
    run.__name__: run
    for run in (verl_sound, verl_judge, wandb_sound, wandb_warm, trl_sound, trl_sft, trl_dpo)
}
