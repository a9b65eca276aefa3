"""Facts about this machine: cards, drivers, compilers, control groups, and the libraries of
llama.cpp that a process uses.

The package needs only the standard library, since parts of it run before anything is installed.
"""
