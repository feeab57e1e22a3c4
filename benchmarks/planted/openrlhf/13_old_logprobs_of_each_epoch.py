"""MISTAKE: a fork computes the old log-probs again before each epoch over the buffer, so later epochs are never held near the policy that sampled."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


class Forked(Trainer):
    def fit_actor(self):
        epochs, self.args.train.max_epochs = self.args.train.max_epochs, 1
        for epoch in range(epochs):
            for item in self.replay_buffer.items if epoch else ():
                self.refresh(item)
            status = super().fit_actor()
        self.args.train.max_epochs = epochs
        return status

    @torch.no_grad()
    def refresh(self, item):
        self.actor.eval()
        ids, mask, present = (v.reshape(1, -1) for v in (item.sequences, item.action_mask, item.attention_mask))
        now = self.actor(ids, mask.bool(), present)
        item.action_log_probs = now.reshape(item.action_log_probs.shape)


run(Forked(train__max_epochs=4, train__batch_size=12, actor__adam__lr=3e-3), __file__)
