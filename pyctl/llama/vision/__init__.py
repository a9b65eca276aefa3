"""Images for llama.cpp: the only caller of libmtmd, which calls itself experimental."""
