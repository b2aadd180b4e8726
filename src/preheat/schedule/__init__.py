"""Who runs in the next step, on which blocks: pure Python and numpy, no torch."""
