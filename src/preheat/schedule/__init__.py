"""The scheduler: the rows of the next step and their blocks.

Pure Python and numpy, no torch.
"""
