"""The rewards of a run: their arguments, where they are called, and how scores become a group.

No torch here.
"""
