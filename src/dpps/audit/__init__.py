"""Attacks on the code and on the data: they may import everything."""
