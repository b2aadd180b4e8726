"""The plan of an engine.

It has bucket sizes, buckets, items, their cost and their memory. Pure Python and numpy.
"""
