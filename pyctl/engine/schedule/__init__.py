"""The scheduler: assigns sequences and cells to requests."""
