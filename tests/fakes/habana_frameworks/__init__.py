"""A fake of Habana's frameworks: a Gaudi that computes on the host.

It is for tests, and never part of the package. Nothing here is Habana's code. :mod:`habana_frameworks.simulator` says
how the fake refuses, counts and charges.
"""
