"""Training: the loops of all methods, and the pipeline of stages."""
