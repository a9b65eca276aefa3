"""The canary: evaluates the ends of cached snapshots again, and compares every bit.

An idle engine does this once an hour. `canary_schedule` has the times, `targets` the choice,
`sources` the bytes of a snapshot in one place, `recheck_planner` the batches, `recheck` their
evaluation, and `set_aside` the sequences that give up their cells meanwhile. `canary` runs a check
step by step, and quarantines those that differ.
"""
