"""Ollama's endpoints, for desktop tools."""
