"""Rewards for answers that are numbers, formulas or words, and for the calculations that lead to them."""
