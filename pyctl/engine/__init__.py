"""From a prompt to tokens: restores, evaluates, samples and saves, on one thread that owns the model.

**Ownership.** A `Worker` starts one thread, ``pyctl-engine``, which runs the `Engine`. From then on it alone touches
the engine, its live sequences, the `PrefixCache`, the cache in RAM with every snapshot and segment in it, and the
backend with its samplers: none of these has a lock. Other threads hand over:

- a request, by `Worker.submit`: the prompt and its settings are immutable; events come back through a `RequestHandle`,
  written by the engine's thread and read by one consumer. To cancel is to set a flag that each step looks at.
- a function, by `Worker.call` (all of `EngineAdmin`): it runs between two steps, and its future holds the result.
- a snapshot for the disk: the write queue gets immutable copies, and never sees the cache in RAM.

**Threads.** The event loop of the server parses, merges and sends; a pool renders and tokenises. ``pyctl-disk`` writes,
a segment at a time; ``pyctl-disk-recovery`` looks through the directory once, at start; ``disk-read`` and
``disk-write`` are pools that check and compress chunks. The extension has one thread that takes pinned memory ahead of
need. ``pyctl-start`` loads the model while the server answers already, and watches the engine's thread from then on.

**Locks.** None is held while the model evaluates, and the engine's thread waits for none that is held during a write to
disk. They guard the write queue, the connections of the index, the memory of pieces tokenised and replies remembered,
the stored responses, and llama.cpp's log.
"""
