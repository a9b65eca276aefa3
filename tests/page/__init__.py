"""The page in a real browser, in front of real servers."""
