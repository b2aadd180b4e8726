"""Platforms: each folder is one backend. Nothing outside of here knows a platform by name."""
