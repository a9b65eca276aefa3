"""The HTTP server: endpoints of several APIs, over the way of a request in `pyctl.requests`."""
