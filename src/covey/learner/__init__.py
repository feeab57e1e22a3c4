"""The learner: the weights under training and their updates; it knows no run, no files, no console."""
