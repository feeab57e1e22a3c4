"""Training: the reinforcement loop, the supervised loop, and the pipeline of stages."""
