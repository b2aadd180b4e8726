"""Adapters (LoRA): read them, and serve them while the engine runs."""
