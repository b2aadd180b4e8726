"""Repeats the bundled language model from public text: corpus, tokenizer, training, export.

Run the steps in order from the repository root, see ``python -m examples.train_bundled --help``.
"""
