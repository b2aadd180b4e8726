"""Trains the bundled language model again from public text: corpus, tokenizer, training, export.

Run the steps in order from the repository's root: see ``python -m examples.train_bundled --help`` and "How to repeat
it" in ``src/preheat/bundled/README.md``.
"""
