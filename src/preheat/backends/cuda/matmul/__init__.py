"""Linear layers and routed experts on CUDA."""
