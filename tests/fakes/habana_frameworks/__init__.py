"""A fake of Habana's frameworks, for tests: a Gaudi that computes on the host. Never part of the package.

Nothing here is Habana's code. What the fake refuses, counts and charges is in :mod:`habana_frameworks.simulator`.
"""
