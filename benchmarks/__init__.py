"""The benchmarks: how fast this engine is on this machine, as a whole and in its parts.

``preheat bench NAME``, ``scripts/bench NAME`` and ``python -m benchmarks NAME`` run the same names, listed in
``registry.py``. ``suite`` holds those that measure a whole engine and compare it with vLLM; every other one is a module
of its own here. Results, and vLLM's figures (``anchors.json``), are in ``results``.
"""
