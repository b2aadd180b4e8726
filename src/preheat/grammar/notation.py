"""Grammars as clients write them, read as far as to see whether they end."""
def check_lark(text): pass
def check_ebnf(text): pass
