"""Triton kernels for NVIDIA GPUs. Each gives the bits that the contract of its operation in :mod:`preheat.ops` says."""
