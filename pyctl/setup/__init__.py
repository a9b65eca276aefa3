"""Facts about this machine, and llama.cpp's libraries built for it once, outside of the Python
environment.

The package needs only the standard library, since parts of it run before anything is installed.
"""
