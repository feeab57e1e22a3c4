"""Rewards: from a completion to a number. Verifiers first; no torch here."""
