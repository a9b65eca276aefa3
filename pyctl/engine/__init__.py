"""From a prompt to tokens: restores, evaluates, samples and saves, on one thread that owns the model.

**Who owns what.** One thread, ``pyctl-engine``, is started by a `Worker` and runs the `Engine`. From then on it alone
touches the engine, its live sequences, the `PrefixCache`, the cache in RAM with every snapshot and segment in it, and
the backend with its samplers: none of these has a lock. Before that, and after the worker is closed, they belong to
whoever made them. Everybody else hands something over:

- a request, by `Worker.submit`: the prompt and its settings are immutable; events come back through a `RequestHandle`,
  written by the engine's thread and read by one consumer. To cancel is to set a flag that each step looks at.
- a function, by `Worker.call` (all of `EngineAdmin`): it runs between two steps, and its future holds the result.
- a snapshot for the disk: the tier's writer gets copies whose bytes nobody changes, and never sees the cache in RAM.

**Which threads there are.** The event loop of the server parses, merges and sends; a pool beside it renders and
tokenises. The engine's thread is above. ``pyctl-disk`` writes behind, one snapshot at a time; ``pyctl-disk-recovery``
looks through the directory once, at start; ``disk-read`` and ``disk-write`` are pools that check and compress chunks.
The extension has one thread that takes pinned memory ahead of need. ``pyctl-start`` loads the model while the server
answers already, and watches the engine's thread from then on.

**Which locks there are.** None is held while the model evaluates, and the engine's thread waits for none behind which
somebody writes to a disk. They guard the queue of the writer, the connections of the index, the memory of pieces
tokenised and replies remembered, the stored responses, and llama.cpp's log.
"""
