"""Recorded sessions of coding agents, replayed on a simulated card or on real servers."""
