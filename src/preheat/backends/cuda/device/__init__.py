"""One GPU: its detection, memory, streams, graphs and uploads; launches, and the compilation of kernels."""
