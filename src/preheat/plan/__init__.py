"""What may ever run: bucket sizes, buckets, items, their cost and their memory. Pure Python and numpy."""
