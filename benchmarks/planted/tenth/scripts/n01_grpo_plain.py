"""GRPO as the README shows it."""

from world import grpo, train

train(grpo())
