"""Kernels of linear layers and experts that need Hopper's copy engine and matrix unit."""
