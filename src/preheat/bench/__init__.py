"""``preheat bench``: how fast this engine is on this machine, measured as users would and compared with vLLM.

The workloads, their seeds and their formulas are fixed, so that any two runs can be compared; every part writes what it
found as soon as it has it.
"""
