"""A simulated year: the engine, its cache and its disk on one thread, with faults from a seed."""
