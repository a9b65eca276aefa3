// The memory of a context: the parts that it consists of, and what the library writes of one, in an order that it alone
// decides.
#pragma once

#include "library/cells.h"

#include <functional>
#include <string>

namespace library {

// attention: rows only. hybrid: a state, and rows unless the memory is recurrent alone. opaque: anything else; only the
// library can save it.
enum class memory_kind { attention, hybrid, opaque };

// A cache whose rows grow with the tokens and can be cut anywhere. Of an indexer only the keys may be used.
struct row_set {
    library::cache cache;
    bool           keys_only = false;
};

// The parts of a memory, which belong to the context. All `sets` have the row of a token in the same cell; an opaque
// memory has none. `recurrent` and `window`, the cache of layers that see the last `n_seen` tokens or a chunk of so many,
// are none where there is no such part. `type` is the name of the memory's class.
struct memory_parts {
    memory_kind          kind = memory_kind::opaque;
    std::vector<row_set> sets;
    llama_memory_t       recurrent = nullptr;
    cache                window;
    int64_t              n_seen = 0;
    std::string          type;
};

memory_parts parts_of(llama_context * ctx);

// The first position that a token at n sees of a window, at least the last one before it.
int64_t first_seen(llama_context * ctx, int64_t n);

// A sequence begins in the first plane of a recurrent part, wherever a rollback has left it.
void begin_anew(llama_memory_t recurrent, llama_seq_id seq);

// One step of what a part writes: plain bytes (tensor == nullptr), or `size` bytes of a tensor from `offset` on.
struct io_step {
    ggml_tensor *        tensor = nullptr;
    size_t               offset = 0;
    size_t               size   = 0;
    std::vector<uint8_t> bytes;
};

// What it writes for `seq`. No tensor data moves.
std::vector<io_step> written(llama_memory_t part, llama_seq_id seq);

// The part reads `plain` bytes for `seq`, and has each region (tensor, offset, size) filled by `fill`. std::runtime_error if
// it asks for more bytes; it throws what `fill` does.
using filler = std::function<void(ggml_tensor *, size_t, size_t)>;
void read(llama_memory_t part, llama_seq_id seq, const std::vector<uint8_t> & plain, const filler & fill);

}  // namespace library
