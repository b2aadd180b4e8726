"""Anthropic's endpoint for conversations."""
