"""Sampling: samplers with their grammars, and GBNF as llguidance reads it."""
