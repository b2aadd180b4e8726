"""Proof that bits do not change: the cross-check at boot, and ``preheat verify``."""
