"""Sampling: prompts in, completions with the log-prob of every token out."""
