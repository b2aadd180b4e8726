"""Checkpoints in one GGUF file, the format of llama.cpp."""
