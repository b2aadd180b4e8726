"""Warm-up: runs the plan through the serving path, records what became of it, and watches what runs afterwards."""
