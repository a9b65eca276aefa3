"""The memory of a context: rows and states of its sequences, how they are saved, and checks that
they restore.
"""
