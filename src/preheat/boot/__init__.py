"""The boot of an engine.

:mod:`preheat.boot.engine` boots it. No torch here, as ranks start before it is imported.
"""
