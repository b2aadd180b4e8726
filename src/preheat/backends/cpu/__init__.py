"""The CPU: torch's own kernels, run one after the other."""
