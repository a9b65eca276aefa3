"""The prefix cache: snapshots on the device, in RAM and on disk. It handles bytes and tokens only.

The engine uses `prefix_cache.PrefixCache`, and gives it a memory and a store, which `ports`
describes. The disk package imports the cache, and never the other way round.
"""
