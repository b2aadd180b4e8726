"""The plan of an engine: bucket sizes, buckets, items, their cost and their memory. Pure Python and numpy."""
