"""Readers of runs: a record, and the files that trainers and trackers write by themselves."""
