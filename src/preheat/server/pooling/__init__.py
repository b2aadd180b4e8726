"""Endpoints whose answer is no text: embeddings, scores and classes, also in TEI's forms."""
