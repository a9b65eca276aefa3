"""Fitting a model into memory, in three steps.

`dry_runs` measures: it owns the contexts without memory by which llama.cpp counts, and returns
memory plans. `context_fit`, `layer_fit`, `draft_fit` and `pool_fit` choose by these numbers.
`fitting` makes settings of the choices.
"""
