"""Images: the encoder (libmtmd), and the grid of tokens that an image becomes."""
