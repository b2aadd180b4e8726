"""The sampler: changes of logits, draws, and log-probabilities."""
