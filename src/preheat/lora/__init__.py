"""LoRA adapters: reading them, keeping them, and adding what they add to linear layers."""
