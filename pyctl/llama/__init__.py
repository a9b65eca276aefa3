"""The interface to llama.cpp, through llama-cpp-python and the extension. No other package calls
llama.cpp.

`loader.load` makes a `LlamaBackend`, which implements the ports of `engine` and `cache`. The
package itself imports nothing: settings are read before `library` loads llama.cpp.
"""
