"""The CPU: functions that LLVM compiles, and torch's own kernels."""
