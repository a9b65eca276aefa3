"""Receipts: records of exact replies, with which they can be evaluated again and compared."""
