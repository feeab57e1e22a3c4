"""The work of single commands; `cli` only parses their arguments."""
