"""Draft models on llama.cpp: MTP heads and separate small models."""
