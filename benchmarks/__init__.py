"""The benchmarks: the speed of this engine on this machine.

It is measured as a whole and in its parts. ``preheat bench NAME``, ``scripts/bench NAME`` and ``python -m benchmarks
NAME`` run the same names, listed in ``registry.py``. The benchmarks in ``suite`` measure a whole engine and compare it
with vLLM. Every other benchmark is a module of its own here. Results, and vLLM's figures (``anchors.json``), are in
``results``.
"""
