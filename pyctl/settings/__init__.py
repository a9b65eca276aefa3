"""Declarations that all packages share: a setting with its flag, conversions of texts to values,
and bounds.
"""
