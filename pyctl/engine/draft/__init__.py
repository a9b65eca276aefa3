"""Drafts from n-grams, the cache's texts, or a model. They save steps and never change a reply."""
