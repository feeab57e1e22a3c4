"""A small model learns to find a number by asking: each completion plays with a game of its own.

    python examples/guessing.py

Stage 1 shows it games: one in four players halves what is left with each guess, the others guess at random.
Stage 2 pays a game that is won, and the model finds out whom to follow. Watch the completions of a late step
in `covey ui runs/guessing`.
"""

from __future__ import annotations

import json
import random

import covey

NUMBERS, GUESSES = 7, 3


class Game:
    """A number is to be found with a few guesses."""

    def reset(self, *, secret: int) -> None:
        """Begin with the number of the row, which the model does not see."""
        self.secret, self.guesses, self.won = secret, 0, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 1 to 7.
        """
        self.guesses += 1
        self.won = self.won or number == self.secret
        return "found" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """Whether the number was found."""
        return float(self.won)


def row(secret: int) -> dict[str, object]:
    """A problem. All have the same prompt, so that it gives nothing away."""
    return {"prompt": [{"role": "user", "content": "Which number?"}], "secret": secret}


def watched(rng: random.Random) -> dict[str, object]:
    """A worked answer: a game, one in four of somebody who halves what is left, the others of a guesser."""
    game, said, low, high = Game(), list[dict[str, str]](), 1, NUMBERS
    game.reset(secret=rng.randint(low, high))
    halves = rng.random() < 1 / 4
    while game.guesses < GUESSES and not game.won:
        number = (low + high) // 2 if halves else rng.randint(1, NUMBERS)
        call, answer = {"name": "guess", "arguments": {"number": number}}, game.guess(number)
        low, high = (number + 1, high) if answer == "higher" else (low, number - 1)
        said.append({"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"})
        said.append({"role": "tool", "content": answer})
    return {**row(game.secret), "completion": [*said, {"role": "assistant", "content": "done"}]}


def main() -> None:
    """Show it games, then let it play."""
    rng = random.Random(0)
    problems = [row(secret) for secret in range(1, NUMBERS + 1)]
    result = covey.train(
        model="tiny",
        output="runs/guessing",
        rewards=["environment_reward"],
        rollout={
            "group_size": 16,
            "prompts_per_step": NUMBERS,
            "max_tokens": 200,
            "tools": {"environment": "guessing.py:Game", "max_calls": GUESSES, "result_tokens": 4},
        },
        stages=[
            {
                "method": "sft",
                "data": {"train": [watched(rng) for _ in range(2000)], "test": problems},
                "train": {"steps": 300, "lr": 1e-3, "warmup_steps": 10, "betas": [0.9, 0.95]},
                "eval": {"every": 50, "problems": NUMBERS, "samples": 16},
            },
            {
                "method": "rl",
                "algorithm": {"name": "dapo", "kl": {"coef": 0.1}},
                "data": {"train": problems, "test": problems},
                "train": {"steps": 60, "lr": 2e-4, "warmup_steps": 5, "updates_per_batch": 2, "stop_at": 0.9},
                "eval": {"every": 10, "problems": NUMBERS, "samples": 16},
            },
        ],
    )
    print(result.conclusion.sentence)


if __name__ == "__main__":
    main()
