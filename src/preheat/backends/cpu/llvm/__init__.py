"""Decoder layers as functions that LLVM compiles: execution mode ``llvm`` on a CPU."""
