"""Routed experts: routing, two linear layers of all experts, and the sum over a token's experts."""
