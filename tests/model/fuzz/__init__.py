"""Fuzzers: random grammars, schemas and requests, as many as one likes."""
