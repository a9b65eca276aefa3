"""Settings of a model after every automatic value has been chosen."""
