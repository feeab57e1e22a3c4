"""Trainers with the fields and methods of verl's and OpenRLHF's, as far as a writer touches them.

The policy is a table of logits of the next token given the last one, which really learns. A mistake is
planted by replacing one of a trainer's methods.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
WORDS, PROMPT, WIDTH, SIZE, GROUPS = 12, 3, 8, 4, 6


class Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = BOS, EOS, PAD

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i > EOS or not skip_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


class Policy:
    """Logits of the next token: a row for each last one."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(7)
        logits = torch.randn(WORDS, WORDS, generator=self.random)
        # Most completions end before the limit.
        logits[:, EOS] += 1.5
        self.logits = logits.requires_grad_()
        self.optimizer = torch.optim.SGD([self.logits], lr=2.0)

    def logprobs(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T - 1): value t is token t + 1's."""
        return self.logits.log_softmax(-1)[ids[:, :-1]].gather(-1, ids[:, 1:, None])[..., 0]

    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids (B, T), padded on the right, and which of their places are tokens."""
        ids = prompts
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        present = [torch.ones_like(prompts, dtype=torch.bool)]
        for _ in range(WIDTH):
            with torch.no_grad():
                odds = self.logits.softmax(-1)[ids[:, -1]].clone()
            odds[:, [PAD, BOS]] = 0
            token = torch.multinomial(odds, 1, generator=self.random)
            token[ended] = PAD
            present.append(~ended[:, None])
            ids = torch.cat([ids, token], 1)
            ended |= token[:, 0] == EOS
        return ids, torch.cat(present, 1)


def prompts_of(step: int) -> Tensor:
    """Return (GROUPS * SIZE, PROMPT): each prompt SIZE times."""
    first = torch.arange(GROUPS)
    rows = torch.stack([torch.full_like(first, BOS), 3 + first, 3 + (first * 5 + step) % 9], 1)
    return rows.repeat_interleave(SIZE, 0)


def worth(text: str, answer: str) -> float:
    """The reward: how many of a text's words leave the answer's rest, plus a bit of its length."""
    words = [int(word) for word in text.split()]
    return sum(word % 3 == int(answer) % 3 for word in words) + 0.1 * len(words)


def scores(texts: list[str], truth: list[str]) -> Tensor:
    return torch.tensor([worth(*pair) for pair in zip(texts, truth, strict=True)])


def answers(count: int) -> list[str]:
    """Return the answers of a batch: each prompt has its own."""
    return [str(21 + n // SIZE) for n in range(count)]


def zscores(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    grouped = rewards.view(-1, SIZE)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + eps)).flatten()


def learn(policy: Policy, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Take a step on PPO's loss: two mini-batches. All are (B, T - 1) but the ids."""
    losses = []
    for part in (slice(0, None, 2), slice(1, None, 2)):
        ratio = (policy.logprobs(ids)[part] - old[part]).exp()
        gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
        loss = -(gain * mask[part]).sum() / mask[part].sum()
        policy.optimizer.zero_grad()
        loss.backward()
        policy.optimizer.step()
        losses.append(float(loss.detach()))
    return {"loss": math.fsum(losses) / 2, "norm": float(policy.logits.grad.norm())}


class Batch:
    """A DataProto."""

    def __init__(self, batch: dict[str, Tensor], non_tensor_batch: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch = batch, non_tensor_batch
        self.meta_info: dict[str, Any] = {}


class Column(list):
    """A column of objects, as numpy has it."""

    def tolist(self) -> list[Any]:
        return list(self)


class VerlTrainer:
    """RayPPOTrainer: `fit` makes a batch, computes what belongs to it, and updates the actor."""

    def __init__(self) -> None:
        self.config = {
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "n": SIZE},
                "actor": {"clip_ratio": 0.2, "optim": {"lr": 2.0}},
            },
            "data": {"max_response_length": WIDTH},
            "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
            "trainer": {"wandb_api_key": "secret"},
        }
        self.tokenizer = Tokenizer()
        self.train_dataset = SimpleNamespace(
            dataframe={"prompt": [str(n) for n in range(9)]}, prompt_key="prompt"
        )
        self.val_dataset = None
        self.policy = Policy()
        self.sampler = self.policy
        self.global_steps = 1

    def fit(self, steps: int = 4) -> None:
        for _ in range(steps):
            ids, present = self.sampler.sample(prompts_of(self.global_steps))
            fields = {
                "prompts": ids[:, :PROMPT],
                "responses": ids[:, PROMPT:],
                "input_ids": ids,
                "attention_mask": present.long(),
                "rollout_log_probs": self.sampler.logprobs(ids).detach()[:, -WIDTH:],
            }
            uids = Column(f"{self.global_steps}-{n // SIZE}" for n in range(len(ids)))
            truth = answers(len(ids))
            others = {
                "uid": uids,
                "reward_model": Column({"ground_truth": answer} for answer in truth),
                "data_source": Column(["rests"] * len(ids)),
            }
            batch = Batch(fields, others)
            fields["response_mask"] = self.mask(present[:, PROMPT:].long())
            fields["old_log_probs"] = self.old(batch)
            texts = [self.tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in ids[:, PROMPT:]]
            rewards = self.rewards(scores(texts, truth))
            ends = torch.nn.functional.one_hot(present[:, PROMPT:].sum(1) - 1, WIDTH)
            fields["token_level_scores"] = fields["token_level_rewards"] = ends * rewards[:, None]
            fields["advantages"] = self.advantages(rewards, uids)[:, None] * fields["response_mask"]
            self._update_actor(batch)
            self.global_steps += 1

    def mask(self, present: Tensor) -> Tensor:
        return present

    def old(self, batch: Batch) -> Tensor:
        return self._compute_old_log_prob(batch)[0].batch["old_log_probs"]

    def rewards(self, scores: Tensor) -> Tensor:
        return scores

    def advantages(self, rewards: Tensor, uids: list[str]) -> Tensor:
        return zscores(rewards)

    def _compute_old_log_prob(self, batch: Batch) -> tuple[Batch, float]:
        found = self.policy.logprobs(batch.batch["input_ids"]).detach()[:, -WIDTH:]
        return Batch({"old_log_probs": found}, {}), 0.5

    def _update_actor(self, batch: Batch) -> Batch:
        own = batch.batch
        wide = [torch.cat([torch.zeros(len(v), PROMPT - 1), v], 1) for v in map(own.get, TRAINED)]
        found = learn(self.policy, own["input_ids"], *wide)
        batch = Batch({}, {})
        batch.meta_info["metrics"] = {
            "actor/pg_loss": [found["loss"]] * 2,
            "actor/grad_norm": [found["norm"]] * 2,
            "actor/lr": 2.0,
            "critic/score/mean": 1.0,
        }
        return batch


TRAINED = ("old_log_probs", "advantages", "response_mask")


class Maker:
    """RemoteExperienceMaker: one Experience of the whole batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def make_experience_batch(self, samples: tuple[Tensor, Tensor]) -> list[SimpleNamespace]:
        ids, present = samples
        tokenizer = Tokenizer()
        # OpenRLHF's rewards get texts with the token that ends them.
        texts = [tokenizer.decode([i for i in row if i != PAD]) for row in ids[:, PROMPT:].tolist()]
        truth = answers(len(ids))
        rewards = self.rewards(scores(texts, truth))
        response = present.clone()
        response[:, :PROMPT] = False
        experience = SimpleNamespace(
            sequences=ids,
            attention_mask=present.long(),
            action_mask=self.mask(response),
            rollout_log_probs=self.policy.logprobs(ids).detach(),
            base_action_log_probs=None,
            prompts=[tokenizer.decode(row.tolist()) for row in ids[:, :PROMPT]],
            labels=truth,
            rewards=rewards,
            info={"reward": rewards},
            index=list(range(len(ids))),
            mm_train_inputs=[None] * len(ids),
        )
        experience.action_log_probs = self.old(experience)
        experience.advantages = self.advantages(rewards)[:, None] * experience.action_mask
        return [experience]

    def mask(self, response: Tensor) -> Tensor:
        return response[:, 1:].long()

    def old(self, experience: SimpleNamespace) -> Tensor:
        return self.policy.logprobs(experience.sequences).detach() * experience.action_mask

    def rewards(self, scores: Tensor) -> Tensor:
        return scores

    def advantages(self, rewards: Tensor) -> Tensor:
        return zscores(rewards, 1e-9)

    def _dispatch_forward(self, group: Policy, _sync: bool, **given: list[Tensor]) -> list[list[Tensor]]:
        return [[group.logprobs(ids).detach() for ids in given["sequences"]]] * 2

    def _flatten_results(self, refs: list[list[Tensor]], copies: int) -> list[Tensor]:
        return [tensor for ref in refs[::copies] for tensor in ref]


class OpenRlhfTrainer:
    """BasePPOTrainer: `train_step` makes experiences and trains on them."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=SIZE, temperature=1.0, max_new_tokens=WIDTH),
            algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm")),
            ds=SimpleNamespace(ring_attn_size=2, tensor_parallel_size=1),
            logger=SimpleNamespace(wandb=SimpleNamespace(key="secret")),
        )
        self.tokenizer = Tokenizer()
        self.policy = self.actor_model_group = Policy()
        self.experience_maker = Maker(self.policy)
        self.made: list[SimpleNamespace] = []

    def fit(self, steps: int = 4) -> None:
        for step in range(steps):
            samples = self.policy.sample(prompts_of(step))
            self.made = self.experience_maker.make_experience_batch(samples)
            self.ppo_train(step)

    def ppo_train(self, _step: int) -> dict[str, float]:
        (e,) = self.made
        found = learn(self.policy, e.sequences, e.action_log_probs, e.advantages, e.action_mask)
        return {"policy_loss": found["loss"], "actor_grad_norm": found["norm"], "actor_lr": 2.0}
