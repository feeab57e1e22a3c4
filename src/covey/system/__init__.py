"""The process and its surroundings: signals, ranks, files that others wrote, faults put in on purpose."""
