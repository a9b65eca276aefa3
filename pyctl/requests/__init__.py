"""Requests to the engine: typed bodies, and the way from a body to a prompt, a sampling and a
constraint.

The HTTP server and the chat at a terminal both take this way, so no HTTP response is made here.
"""
