"""Rows outside of llama.cpp's context, which keeps no more than a batch of them."""
