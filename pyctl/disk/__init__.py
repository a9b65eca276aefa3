"""The cache's third tier: snapshots in files that survive a restart; docs/internals/disk-format.md
describes them.
"""
