"""The rewards of a run: what each gets, where it is called, and how scores become a group. No torch here."""
