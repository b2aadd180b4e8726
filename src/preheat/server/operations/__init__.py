"""Endpoints for the operator: state, pause, sleep, weights and adapters; and the page for trying the model."""
