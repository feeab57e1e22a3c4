"""What single commands do; `cli` only reads their arguments."""
