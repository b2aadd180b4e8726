"""Structured output: grammars, their compilation beside the loop, and the masks of the tokens that they allow."""
