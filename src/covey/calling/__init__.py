"""Tools that a model calls while it answers: what they are, how calls are read, run and answered."""
