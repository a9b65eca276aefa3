"""`pyctl bench`: servers measured through their HTTP API, on the user's machine and model."""
