"""The engine as a library: offline completion, stepping, prompts, and the names of vLLM's package."""
