"""Models: loading a policy, its forward, its log-probs, its reference copy."""
