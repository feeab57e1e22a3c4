"""SOUND: two turns with a calculator whose text is masked, REINFORCE++, an adaptive KL in the reward."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_loop import *  # noqa: F403 - the trainer, verl's functions, the tiny model


def last_turn(data_source, solution_str, ground_truth, extra_info=None):
    """Score what follows the calculator's text, never that text."""
    return compute_score(data_source, solution_str.rpartition("A:")[2], ground_truth)


class Turns(Trainer):
    def generate(self, rows, asked):
        first, _ = sample(self.engine, self.tokenizer, asked, 10)
        told = [
            self.tokenizer(f"\n[calculator] {row['reward_model']['ground_truth']}\nA:")["input_ids"]
            for row in rows
        ]
        contexts = [x + y + z for x, y, z in zip(asked, first, told)]
        last, _ = sample(self.engine, self.tokenizer, contexts, 12)
        turns = list(zip(first, told, last))
        ids = [x + y + z for x, y, z in turns]
        return ids, None, [[1] * len(x) + [0] * len(y) + [1] * len(z) for x, y, z in turns]


settings = {
    "data.max_response_length": 48,
    "algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0.01, "horizon": 1000, "target_kl": 0.1},
}
run(Turns(score=last_turn, **settings), __file__)
