"""Insight: what a run means, in words and pictures."""
