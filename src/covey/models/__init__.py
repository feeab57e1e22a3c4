"""Models: policies, reward models and value heads; their loading, forward pass, log-probs and templates."""
