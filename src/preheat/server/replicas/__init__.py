"""Engines behind the server: their processes, replicas, several models, and pods on other machines."""
