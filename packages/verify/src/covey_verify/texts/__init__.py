"""Rewards for the form of a completion (format, structure, language, length), and a model as a judge."""
