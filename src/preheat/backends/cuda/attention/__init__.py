"""Attention over the paged cache, and the writes to it."""
