"""From a schedule to tokens: packing, the executor, caches and drafting."""
