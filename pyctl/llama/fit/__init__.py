"""Fitting a model into memory: dry runs, memory plans, and settings that fit the free memory."""
