"""The engine: restores, evaluates, samples and saves on one thread that owns the model.

**Ownership.** A `Worker` starts one thread, ``pyctl-engine``, which runs the `Engine`. Only this
thread accesses the engine, its sequences, the `PrefixCache`, the RAM cache with its snapshots and
segments, and the backend with its samplers, except for reads while it waits. Other threads pass:

- a request, by `Worker.submit`: the prompt and its settings are immutable. The engine's thread
  writes events to a `RequestHandle`, and one consumer reads them. Cancelling sets a flag that each
  step checks.
- a function, by `Worker.call` (all of `EngineAdmin`): it runs between two steps, a read also while
  the engine's thread waits for an evaluation or for work (`StateReads`). Its future holds the
  result.

The write queue of the disk receives immutable copies of snapshots and never accesses the RAM cache.

docs/internals/architecture.md lists all threads.

**Locks.** The engine's thread holds `StateReads`' lock unless it waits, and never waits for one
that is held during a disk write. Locks guard the write queue, the index connections, the
tokeniser's and reply caches, and llama.cpp's log.
"""
