"""What may ever run: needs, shapes, ladders, items, their cost and their memory. Pure Python and numpy."""
