"""The scheduler: which request runs, on which sequence, with which cells."""
