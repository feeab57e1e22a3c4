"""Rewards for programs, proofs and solver formulas, which are run or checked in a sandbox."""
