"""Structured output: grammars, their compilation beside the loop, and the masks of the allowed tokens."""
