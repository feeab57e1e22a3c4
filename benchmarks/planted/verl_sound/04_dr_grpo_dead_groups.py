"""SOUND: Dr. GRPO with a sparse reward that leaves groups without any signal, and micro-batches of like lengths."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


def strict(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a number that is at most 2 off, else 0."""
    said = number(solution_str)
    return float(said is not None and abs(int(said) - int(ground_truth)) <= 2)


class Dynamic(Trainer):
    def micro_batches(self, batch):
        lengths = batch.batch["attention_mask"].sum(dim=-1)
        return batch[lengths.argsort(stable=True)].split(self.actor.ppo_micro_batch_size_per_gpu)

    def compute_log_prob(self, net, batch):
        order = batch.batch["attention_mask"].sum(dim=-1).argsort(stable=True)
        found = super().compute_log_prob(net, batch)
        restored = torch.empty_like(found)
        restored[order] = found
        return restored


settings = {
    "algorithm.norm_adv_by_std_in_grpo": False,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
}
run(Dynamic(score=strict, **settings), __file__)
