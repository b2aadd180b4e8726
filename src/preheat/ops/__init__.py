"""Operations, one file each: contract in words, reference and kernels."""
