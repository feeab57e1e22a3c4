"""Answers that are numbers, formulas or words, and calculations on the way to them."""
