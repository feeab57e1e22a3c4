"""Where processes of a run are placed: samplers, reward workers and trainers on a Ray cluster."""
