"""The files and fields of a model that say how its hidden states become embeddings, classes or scores. No torch."""
