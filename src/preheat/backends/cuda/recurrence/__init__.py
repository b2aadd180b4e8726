"""Recurrences (linear attention): layers that keep a state a sequence in place of a cache."""
