"""The backend protocol: the only interface to a platform.

A backend is its facts (known without torch: modes, cost figures, rejected options), its memory, and its operations:
linear layers, norms, attention over the paged cache, the sampler, and the driver that runs programs. Everything above
uses this protocol; no platform's name occurs outside of :mod:`preheat.backends`. Nothing here imports torch.
"""
