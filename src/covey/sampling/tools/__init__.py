"""Tools that a model calls while it answers: their schemas, and how calls are read, run and answered."""
