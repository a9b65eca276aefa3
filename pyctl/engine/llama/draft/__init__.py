"""Draft models on llama.cpp: files of their own, and what they have to have in common with the model."""
