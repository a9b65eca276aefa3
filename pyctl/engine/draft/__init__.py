"""Drafts: tokens that may follow, from n-grams, from what the cache remembers, or from a model; they choose nothing."""
