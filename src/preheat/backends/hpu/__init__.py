"""Gaudi: its facts. No kernels yet: the device cannot be picked."""
