"""Ranks that share layers: their processes, messages and deaths."""
