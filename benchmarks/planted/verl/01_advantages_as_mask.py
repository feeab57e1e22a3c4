"""MISTAKE: the actor passes the advantages as the response mask to the policy loss, as verl did for a while."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


class Forked(Trainer):
    def loss(self, micro, on_policy):
        log_prob, _ = self.forward(self.net, micro)
        old = log_prob.detach() if on_policy else micro["old_log_probs"]
        pg_loss, own = get_policy_loss_fn("vanilla")(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=micro["advantages"],
            response_mask=micro["advantages"],
            loss_agg_mode=self.actor.loss_agg_mode,
            config=self.actor,
        )
        return pg_loss, pg_loss, own


run(Forked(actor_rollout_ref__actor__ppo_mini_batch_size=2), __file__)
