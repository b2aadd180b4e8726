"""Benchmarks of a whole engine, measured as users would and compared with vLLM.

Workloads, seeds and formulas are fixed, so that any two runs can be compared. Every figure is written as soon
as it is known.
"""
