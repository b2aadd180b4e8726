"""Models: specs read from a checkpoint's config, weights loaded by them, and the decoder that runs them."""
