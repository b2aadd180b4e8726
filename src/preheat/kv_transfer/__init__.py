"""Blocks of the KV cache between engines: one reads prompts, another decodes. No torch here."""
