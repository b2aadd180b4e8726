"""Exchange between the GPUs that share a model."""
