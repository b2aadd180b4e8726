"""NVIDIA GPUs: kernels in Triton with the bits of the contracts in `preheat.ops`."""
