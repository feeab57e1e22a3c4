"""One process in the shape of OpenRLHF's PPOTrainer, for scripts that override a step of it.

Its experience maker, replay buffer, losses, KL, actor and normalizers are OpenRLHF's own; the groups of Ray
actors and the vLLM engines are replaced by objects in this process.
"""

import copy
from argparse import Namespace
from types import SimpleNamespace

import torch
from frameworks import use
from tiny import closeness, model, number, out, sample, sums, tokenizer

use("openrlhf")
torch.cuda.current_device = lambda: 0  # the replay buffer asks for it, and sends nothing there
from openrlhf.models import Actor, PolicyLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.utils.config import hierarchize  # noqa: E402
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from covey.audit.writers.openrlhf import record_run  # noqa: E402

DEFAULTS = {
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "actor.adam.lr": 1e-3,
    "actor.max_norm": 1.0,
    "actor.eps_clip_low_high": [0.2, 0.2],
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.entropy_coef": None,
    "critic.freezing_steps": -1,
    "algo.advantage.estimator": "group_norm",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.0,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "data.max_len": 64,
    "data.label_key": "answer",
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "ds.lora.rank": 0,
    "ref.model_name_or_path": None,
    "reward.clip_range": [-10, 10],
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1.0,
    "reward.stop_properly_penalty_coef": None,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 6,
    "rollout.micro_batch_size": 8,
    "rollout.max_new_tokens": 24,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.batch_size": 24,
    "train.micro_batch_size": 12,
    "train.max_epochs": 1,
    "train.dynamic_batch_enable": False,
    "train.colocate_all": True,
    "train.colocate_actor_ref": True,
    "train.colocate_critic_reward": False,
    "vllm.enable_prefix_caching": False,
    "vllm.dtype": "float32",
    "vllm.num_engines": 1,
    "train.max_steps": 5,
}


def reward_func(queries, prompts, labels, **kwargs):
    """1 for the right number behind the prompt, less for another: a `reward.remote_url` that is a file."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts)]
    paid = torch.tensor(closeness(answers, labels))
    return {"rewards": paid, "scores": paid, "extra_logs": {}}


class Group:
    """A RayActorGroup of one worker that computes log-probs; references are the values themselves."""

    def __init__(self, actor):
        self.actor = actor

    def async_run_method(self, method_name, **given):
        return []

    @torch.no_grad()
    def async_run_method_batch(self, method_name, sequences, action_mask, attention_mask, **given):
        self.actor.eval()
        return [[self.actor(s, a.bool(), m) for s, a, m in zip(sequences, action_mask, attention_mask)]]


class Trainer:
    """BasePPOTrainer and its ActorPPOTrainer; the settings are dotted names of OpenRLHF's arguments."""

    def __init__(self, rows=None, score=reward_func, **settings):
        own = {name.replace("__", "."): value for name, value in settings.items()}
        self.args = hierarchize(Namespace(**{**DEFAULTS, **own}))
        self.strategy = SimpleNamespace(args=self.args, ring_attn_group=None)
        torch.manual_seed(7)
        self.tokenizer = tokenizer()
        self.score = score
        self.rows = rows or sums(32)
        self.init_models()
        self.kl_ctl = FixedKLController(self.args.algo.kl.init_coef)
        self.experience_maker = self.make_maker()(
            self.actor_model_group,
            None,
            None,
            self.reference_model_group,
            self.kl_ctl,
            self.strategy,
            self.tokenizer,
        )
        advantage = self.args.algo.advantage
        self.actor_loss_fn = PolicyLoss(
            clip_eps_low=self.args.actor.eps_clip_low_high[0],
            clip_eps_high=self.args.actor.eps_clip_low_high[1],
            dual_clip=self.args.actor.dual_clip,
            policy_loss_type=self.args.actor.policy_loss_type,
            enable_vllm_is_correction=advantage.is_correction_enable,
            vllm_is_truncated_threshold=advantage.is_correction_threshold,
            vllm_is_correction_type=advantage.is_correction_type,
        )
        self.replay_buffer = NaiveReplayBuffer(self.args.train.micro_batch_size)

    def init_models(self):
        self.net = self.load_policy()
        self.actor = self.wrap(self.net)
        self.actor_model_group = Group(self.actor)
        needs_reference = self.args.algo.kl.init_coef > 0
        self.reference_model_group = Group(self.wrap(self.load_reference())) if needs_reference else None
        self.engine = copy.deepcopy(self.net).to(getattr(torch, self.args.vllm.dtype))
        # Engines compute log-probs in float32, whatever their weights are.
        self.engine.get_output_embeddings().register_forward_hook(
            lambda module, given, logits: logits.float()
        )
        self.actor_optim = torch.optim.AdamW(
            [p for p in self.net.parameters() if p.requires_grad],
            lr=self.args.actor.adam.lr,
            weight_decay=0.0,
        )

    def load_policy(self):
        return model()

    def load_reference(self):
        return model()

    def wrap(self, net):
        actor = Actor(net, temperature=self.args.rollout.temperature)
        actor.packing_samples = False
        return actor

    def make_maker(self):
        return RemoteExperienceMaker

    def fit(self):
        for step in range(self.args.train.max_steps):
            self.train_step(self.make_samples(step), step)

    # The rollout.

    def make_samples(self, step):
        """Return an Experience of each sample, in the order of prompts."""
        count, n = self.args.rollout.batch_size, self.args.rollout.n_samples_per_prompt
        first = step * count % len(self.rows)
        rows = [row for row in self.rows[first : first + count] for _ in range(n)]
        responses = self.generate(rows)
        for response in responses:
            query = self.tokenizer.decode(response["observation_tokens"], skip_special_tokens=False)
            found = self.score([query], [response["prompt"]], [response["label"]])
            response |= {"reward": found["rewards"][0].item(), "scores": found["scores"][0].item()}
        process = SamplesGenerator._process_response_into_experience
        return [process(None, response, max_len=self.args.data.max_len) for response in responses]

    def generate(self, rows):
        """Return the responses of vLLM as the executor of single turns packs them."""
        asked = [self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
        most = self.args.rollout.max_new_tokens
        ids, logps = sample(self.engine, self.tokenizer, asked, most, self.args.rollout.temperature)
        return [self.response(*each) for each in zip(rows, asked, ids, logps)]

    def response(self, row, asked, ids, logps):
        known = self.args.algo.advantage.is_correction_enable
        return {
            "prompt": row["prompt"],
            "label": row["answer"],
            "observation_tokens": asked + ids,
            "action_ranges": [(len(asked), len(asked) + len(ids))],
            "rollout_log_probs": [0.0] * len(asked) + logps if known else None,
            "truncated": ids[-1] != self.tokenizer.eos_token_id,
        }

    # The step.

    def train_step(self, rollout_samples, global_step):
        experiences = self.experience_maker.make_experience_batch(rollout_samples)
        # Ray sends a copy to the workers.
        for experience in copy.deepcopy(experiences):
            self.replay_buffer.append(experience)
        self.ppo_train(global_step)
        self.broadcast_to_vllm()

    def ppo_train(self, global_steps):
        if global_steps <= self.args.critic.freezing_steps:
            self.replay_buffer.clear()
            return {}
        status = self.fit_actor()
        self.replay_buffer.clear()
        return status

    def fit_actor(self):
        """Epochs over the shuffled buffer; one optimizer step for each train.batch_size samples."""
        micro, gas = (
            self.args.train.micro_batch_size,
            self.args.train.batch_size // self.args.train.micro_batch_size,
        )
        loader = DataLoader(
            self.replay_buffer,
            batch_size=micro,
            shuffle=True,
            drop_last=True,
            collate_fn=self.replay_buffer.collate_fn,
        )
        losses, tokens, status = [], [], {}
        for _ in range(self.args.train.max_epochs):
            windows = iter_grad_accum_global_norm(loader, self.strategy, gas, lambda e: e.action_mask)
            for step, (experience, info) in enumerate(windows):
                loss, own = self.training_step(experience, info)
                (loss / gas).backward()  # DeepSpeed divides by the number of accumulated micro-batches
                losses.append(own.item() * int(experience.action_mask.sum()))
                tokens.append(int(experience.action_mask.sum()))
                if (step + 1) % gas == 0:
                    status["actor_grad_norm"] = self.optimizer_step()
        status |= {"policy_loss": sum(losses) / sum(tokens), "actor_lr": self.args.actor.adam.lr}
        return status

    def optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.args.actor.max_norm)
        self.actor_optim.step()
        self.actor_optim.zero_grad()
        return norm.item()

    def training_step(self, experience, info):
        """Return the loss that is trained and the policy loss."""
        self.actor.train()
        args, mask = self.args, experience.action_mask
        log_probs, output = self.actor(
            experience.sequences,
            mask,
            attention_mask=experience.attention_mask,
            return_output=True,
            return_entropy=args.actor.entropy_coef is not None,
        )
        policy_loss = self.actor_loss_fn(
            log_probs,
            experience.action_log_probs,
            experience.advantages,
            action_mask=mask,
            rollout_log_probs=experience.rollout_log_probs,
            **info,
        )[0]
        loss = policy_loss
        if args.algo.kl.use_loss and args.algo.kl.init_coef > 0:
            kl = compute_approx_kl(
                log_probs, experience.base_action_log_probs, kl_estimator=args.algo.kl.estimator
            )
            loss = loss + self.kl_ctl.value * aggregate_loss(kl, mask, **info)
        if args.actor.entropy_coef is not None:
            loss = loss + self.entropy_term(aggregate_loss(output.entropy[:, -mask.shape[1] :], mask, **info))
        return loss, policy_loss.detach()

    def entropy_term(self, entropy):
        return -self.args.actor.entropy_coef * entropy

    def broadcast_to_vllm(self):
        """Send each parameter to the engine."""
        for name, parameter in self.net.named_parameters():
            self.update_weight(name, parameter.detach())

    def update_weight(self, name, value):
        self.engine.get_parameter(name).data.copy_(value)


def run(trainer, file):
    """Record a run beside its script."""
    record_run(trainer, out(file), score=trainer.score)
    trainer.fit()
