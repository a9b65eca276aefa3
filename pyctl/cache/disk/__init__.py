"""The cache's third tier: snapshots in files that survive a restart; docs/disk-format.md describes them."""
