"""The run folder: what is written, when it is safe, and how a run finds its way back."""
