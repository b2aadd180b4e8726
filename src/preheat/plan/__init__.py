"""The plan of an engine: everything that may ever run.

It has bucket sizes, buckets, items, their cost and their memory. Pure Python and numpy.
"""
