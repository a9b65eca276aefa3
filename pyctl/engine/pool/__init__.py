"""A KV pool: rows of a context that is larger than the device has room for. How much of it there is, and where."""
