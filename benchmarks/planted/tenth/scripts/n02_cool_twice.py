"""Temperature 0.6, two updates per rollout, GSPO's ratio of sequences."""

from world import grpo, train

train(grpo(temperature=0.6, num_iterations=2, importance_sampling_level="sequence", epsilon=0.03))
