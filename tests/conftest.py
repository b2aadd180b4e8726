"""Most tests boot an engine for a few steps and look at what it computes: they leave warm-up to those that test it."""

import os

os.environ.setdefault("PREHEAT_SKIP_WARMUP", "1")
os.environ.setdefault("PREHEAT_ON_COLD", "count")
os.environ.setdefault("PREHEAT_CACHE_DIR", "off")
