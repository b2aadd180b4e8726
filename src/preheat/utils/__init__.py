"""Small helpers that belong to no other part."""
