"""One process in the shape of verl's RayPPOTrainer and its dp_actor, for scripts that override a step of it.

Advantages, losses, KL, masked means and corrections are verl's own functions.
"""

import copy
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from frameworks import use
from tiny import closeness, model, number, out, sample, sums, tokenizer

use("verl")
import verl.utils.torch_functional as verl_F  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo.core_algos import agg_loss, get_kl_controller, get_policy_loss_fn, kl_penalty  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch  # noqa: E402

from covey.audit.writers.verl import record_run  # noqa: E402

DEFAULTS = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 16,
    "data.max_response_length": 24,
    "data.truncation": "error",
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 12,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.global_batch_info": {},
    "actor_rollout_ref.rollout.n": 6,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "algorithm.adv_estimator": "grpo",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1},
    "algorithm.rollout_correction": None,
    "trainer.total_training_steps": 5,
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number, less for another: a `custom_reward_function`."""
    return closeness([solution_str], [ground_truth])[0]


def rows_of_sums(count=32):
    """Rows as verl's data preparation leaves them."""
    return [
        {
            "prompt": row["prompt"],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": n},
        }
        for n, row in enumerate(sums(count))
    ]


class Trainer:
    """RayPPOTrainer's driver and its one worker; the settings are dotted names of verl's config."""

    def __init__(self, rows=None, score=compute_score, **settings):
        own = {name.replace("__", "."): value for name, value in settings.items()}
        self.config = OmegaConf.create({})
        for name, value in {**DEFAULTS, **own}.items():
            OmegaConf.update(self.config, name, value)
        torch.manual_seed(7)
        self.tokenizer = tokenizer()
        self.score = score
        self.rows = rows or rows_of_sums()
        self.train_dataset = SimpleNamespace(
            dataframe={"prompt": [row["prompt"] for row in self.rows]}, prompt_key="prompt"
        )
        self.kl_ctrl = get_kl_controller(self.config.algorithm.kl_ctrl)
        self.global_steps = 0
        self.init_workers()

    @property
    def actor(self):
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self):
        return self.config.actor_rollout_ref.rollout

    def init_workers(self):
        self.net = model()
        self.ref = model().eval()
        self.engine = copy.deepcopy(self.net).to(getattr(torch, self.rollout.dtype))
        # Engines compute log-probs in float32, whatever their weights are.
        self.engine.get_output_embeddings().register_forward_hook(
            lambda module, given, logits: logits.float()
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.actor.optim.lr, weight_decay=0.01)

    def fit(self):
        """The training loop of PPO, in RayPPOTrainer's order."""
        self.global_steps = 1
        while self.global_steps <= self.config.trainer.total_training_steps:
            batch = self.make_batch(self.next_rows())
            batch = self.score_and_weigh(batch)
            self._update_actor(batch)
            self.update_weights()
            self.global_steps += 1

    # The rollout.

    def next_rows(self):
        count = self.config.data.train_batch_size
        first = (self.global_steps - 1) * count % len(self.rows)
        return self.rows[first : first + count]

    def make_batch(self, rows):
        """Generate n responses to each prompt."""
        n = self.rollout.n
        uids = [f"{self.global_steps}-{i}" for i in range(len(rows))]
        rows, uids = [row for row in rows for _ in range(n)], [uid for uid in uids for _ in range(n)]
        pairs = [self.tokenize(row["prompt"]) for row in rows]
        prompts, seen = torch.cat([p for p, _ in pairs]), torch.cat([m for _, m in pairs])
        asked = [ids[mask.bool()].tolist() for ids, mask in zip(prompts, seen)]
        answers, logps, masks = self.generate(rows, asked)
        return self.pack(rows, uids, prompts, seen, answers, logps, masks)

    def tokenize(self, prompt):
        given = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        return verl_F.postprocess_data(
            given["input_ids"],
            given["attention_mask"],
            max_length=self.config.data.max_prompt_length,
            pad_token_id=self.tokenizer.pad_token_id,
            left_pad=True,
            truncation=self.config.data.truncation,
        )

    def generate(self, rows, asked):
        """Return responses, their log-probs, and the masks of turns (None for a single turn)."""
        most = self.config.data.max_response_length
        ids, logps = sample(self.engine, self.tokenizer, asked, most, self.rollout.temperature)
        return ids, logps, None

    def pack(self, rows, uids, prompts, seen, answers, logps, masks):
        pad, width = self.tokenizer.pad_token_id, self.config.data.max_response_length
        responses = verl_F.pad_2d_list_to_length(answers, pad, max_length=width)
        present = self.present_tokens(responses, answers)
        attention = torch.cat([seen, present], dim=-1)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=-1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=-1) - 1).clamp(min=0),
            "response_mask": present,
        }
        if masks is not None:
            tensors["response_mask"] = verl_F.pad_2d_list_to_length(masks, 0, max_length=width)
        if self.rollout.calculate_log_probs:
            tensors["rollout_log_probs"] = verl_F.pad_2d_list_to_length(logps, 0.0, max_length=width)
        others = {"uid": uids}
        others |= {
            name: [row[name] for row in rows] for name in ("data_source", "reward_model", "extra_info")
        }
        arrays = {name: np.array(values, dtype=object) for name, values in others.items()}
        return DataProto.from_dict(tensors=tensors, non_tensors=arrays)

    def present_tokens(self, responses, answers):
        """Return the attention mask of the responses."""
        lengths = torch.tensor([len(answer) for answer in answers])
        return (torch.arange(responses.shape[1]) < lengths[:, None]).long()

    # Rewards and advantages.

    def score_and_weigh(self, batch):
        algorithm = self.config.algorithm
        batch.batch["token_level_scores"] = self.reward_fn(batch)
        batch = self.balance(batch)
        correction = algorithm.rollout_correction
        if correction and correction.get("bypass_mode"):
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            OmegaConf.update(self.actor, "policy_loss.rollout_correction", correction, force_add=True)
            self.actor.policy_loss.loss_mode = "bypass_mode"
        else:
            batch.batch["old_log_probs"] = self._compute_old_log_prob(batch)[0].batch["old_log_probs"]
        if self.actor.use_kl_loss or algorithm.use_kl_in_reward:
            batch.batch["ref_log_prob"] = self.compute_log_prob(self.ref, batch)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if algorithm.use_kl_in_reward:
            batch = self.apply_kl(batch)
        if correction and not correction.get("bypass_mode"):
            batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )

    def reward_fn(self, batch):
        """Put the score at the last token of each response, as verl's reward managers do."""
        scores = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
        width = batch.batch["prompts"].shape[-1]
        for i in range(len(batch)):
            item = batch[i]
            length = int(item.batch["attention_mask"][width:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            row = item.non_tensor_batch
            gold = row["reward_model"]["ground_truth"]
            scores[i, length - 1] = self.score(row["data_source"], text, gold, row["extra_info"])
        return scores

    def balance(self, batch):
        """Leave the rows in their order: there is one worker."""
        return batch

    def apply_kl(self, batch):
        return apply_kl_penalty(batch, self.kl_ctrl, kl_penalty=self.config.algorithm.kl_penalty)[0]

    # The worker.

    def forward(self, net, micro):
        """Return log-probs and entropies of the responses, as dp_actor does without padding removal."""
        width = micro["responses"].shape[-1]
        given = {name: micro[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = net(**given, use_cache=False).logits / self.rollout.temperature
        logits = logits[:, -width - 1 : -1, :]
        return verl_F.logprobs_from_logits(logits, micro["responses"]), verl_F.entropy_from_logits(logits)

    def micro_batches(self, batch):
        return batch.split(self.actor.ppo_micro_batch_size_per_gpu)

    @torch.no_grad()
    def compute_log_prob(self, net, batch):
        net.eval()
        return torch.cat([self.forward(net, micro.batch)[0] for micro in self.micro_batches(batch)])

    def _compute_old_log_prob(self, batch):
        return DataProto.from_dict(tensors={"old_log_probs": self.compute_log_prob(self.net, batch)}), 0.0

    def _update_actor(self, batch):
        metrics = self.update_policy(batch)
        metrics["actor/lr"] = self.actor.optim.lr
        return DataProto(meta_info={"metrics": dict(metrics)})

    def update_policy(self, batch):
        """Minibatches, epochs and micro-batches as in dp_actor."""
        self.net.train()
        minis = batch.split(self.actor.ppo_mini_batch_size * self.rollout.n)
        on_policy = len(minis) == 1 and self.actor.ppo_epochs == 1
        metrics = defaultdict(list)
        metrics["actor/pg_loss"] = 0.0
        for _ in range(self.actor.ppo_epochs):
            for mini in minis:
                self.zero_grad()
                for micro in self.micro_batches(mini):
                    scale = len(micro) / len(mini)
                    loss, pg_loss, own = self.loss(micro.batch, on_policy)
                    (loss * scale).backward()
                    metrics["actor/pg_loss"] += pg_loss.item() * scale
                    for name, value in own.items():
                        metrics[name].append(value)
                norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.actor.grad_clip)
                metrics["actor/grad_norm"].append(norm.item())
                self.optimizer.step()
        return metrics

    def zero_grad(self):
        self.optimizer.zero_grad()

    def loss(self, micro, on_policy):
        """Return the loss that is trained, the policy loss and metrics."""
        actor, mode = self.actor, self.actor.loss_agg_mode
        log_prob, entropy = self.forward(self.net, micro)
        old = (
            log_prob.detach()
            if on_policy and not self.config.algorithm.rollout_correction
            else micro["old_log_probs"]
        )
        pg_loss, own = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=micro["advantages"],
            response_mask=micro["response_mask"],
            loss_agg_mode=mode,
            config=self.loss_config(),
            rollout_is_weights=micro.get("rollout_is_weights", None),
        )
        loss = pg_loss
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * agg_loss(entropy, micro["response_mask"], mode)
        if actor.use_kl_loss:
            kld = kl_penalty(log_prob, micro["ref_log_prob"], actor.kl_loss_type)
            kl_loss = agg_loss(kld, micro["response_mask"], mode)
            loss = loss + actor.kl_loss_coef * kl_loss
            own["actor/kl_loss"] = kl_loss.item()
        return loss, pg_loss, own

    def loss_config(self):
        return self.actor

    def update_weights(self):
        """Send the actor's weights to the inference engine."""
        self.engine.load_state_dict(self.net.state_dict())


def run(trainer, file):
    """Record a run beside its script."""
    record_run(trainer, out(file), score=trainer.score)
    trainer.fit()
