"""Placing a run's processes: samplers, reward workers and trainers, on this machine or a Ray cluster."""
