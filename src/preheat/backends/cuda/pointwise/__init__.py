"""Operations without a product of matrices: norms, activations, codes of inputs, rows, digests."""
