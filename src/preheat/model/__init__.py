"""Models: what a checkpoint says, where its tensors lie, and the decoder that runs them."""
