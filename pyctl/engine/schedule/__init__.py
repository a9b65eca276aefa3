"""Who is served when, on which sequence and with which cells."""
