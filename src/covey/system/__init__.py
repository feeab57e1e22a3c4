"""The process and its surroundings: signals, ranks, files that others wrote, injected faults."""
