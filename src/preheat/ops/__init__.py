"""Operations: one file each, with its contract in words, its reference and its kernels."""
