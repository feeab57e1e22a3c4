"""Programs, proofs and formulas for a solver: run or checked where they can touch nothing."""
