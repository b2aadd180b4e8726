"""A fake of Habana's frameworks, for tests: a Gaudi that computes on the host. Never part of the package.

Nothing here is Habana's code. :mod:`habana_frameworks.simulator` says how the fake refuses, counts and charges.
"""
