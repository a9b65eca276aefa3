"""Draft models on llama.cpp: the model's own head, small models in files of their own, and what both have in common."""
