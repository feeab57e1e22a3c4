"""SOUND: an agent of two turns with the environment's text outside the action ranges, REINFORCE++-baseline."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from openrlhf_loop import *  # noqa: F403 - the trainer, OpenRLHF's functions, the tiny model


def last_turn(queries, prompts, labels, **kwargs):
    """Score what follows the environment's text, never that text."""
    answers = [query[len(prompt) :].rpartition("A:")[2] for query, prompt in zip(queries, prompts)]
    return reward_func(answers, [""] * len(answers), labels)


class Agent(Trainer):
    def generate(self, rows):
        asked = [self.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
        first, _ = sample(self.engine, self.tokenizer, asked, 8)
        told = [self.tokenizer(f"\nThink again. {row['prompt']}")["input_ids"] for row in rows]
        contexts = [x + y + z for x, y, z in zip(asked, first, told)]
        last, _ = sample(self.engine, self.tokenizer, contexts, 12)
        found = []
        for row, x, y, z, end in zip(rows, asked, first, told, last):
            packed = self.response(row, x, y + z + end, None)
            start = len(x) + len(y) + len(z)
            packed["action_ranges"] = [(len(x), len(x) + len(y)), (start, start + len(end))]
            found.append(packed)
        return found


run(Agent(score=last_turn, algo__advantage__estimator="reinforce_baseline", data__max_len=96), __file__)
