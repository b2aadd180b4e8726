"""Operations, one file each: its contract in words, and a reference in plain torch."""
