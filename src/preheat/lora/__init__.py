"""Adapters (LoRA): reading them, and serving them while the engine runs."""
