"""Models: specs from a checkpoint's config, loaded weights, and the decoder."""
