// The memory of a context: its parts, and the steps in which the library writes one, in an order of its own.
#pragma once

#include "library/cells.h"

#include <string>

// attention: rows only. hybrid: a state, and rows unless the memory is only recurrent. opaque: anything else; only the
// library can save it.
enum class memory_kind { attention, hybrid, opaque };

// A cache whose rows grow with the tokens and can be cut anywhere. Of an indexer only the keys may be used.
struct row_set {
    library::cache cache;
    bool           keys_only = false;
};

// The parts of a memory, which belong to the context. All `sets` have the row of a token in the same cell; an opaque
// memory has none. `recurrent` and `window`, the cache of layers that see the last `n_seen` tokens or a chunk of so many,
// are none if there is no such part. `type` is the name of the memory's class.
struct memory_parts {
    std::vector<row_set> sets;
    llama_memory_t       recurrent = nullptr;
    library::cache       window    = {};
    memory_kind          kind      = memory_kind::opaque;
    int64_t              n_seen    = 0;
    std::string          type      = {};
};

// One step in which a part writes: plain bytes (tensor == nullptr), or `size` bytes of a tensor from `offset` on.
struct io_step {
    ggml_tensor *        tensor = nullptr;
    size_t               offset = 0;
    size_t               size   = 0;
    std::vector<uint8_t> bytes;
};

// A part of each row of a tensor: `count` pieces of `size` bytes. They lie one after the other in the row of `tensor`, which
// is on one device, from `offset` on; in the whole row from `place` on, `pitch` apart. Data that several devices
// mirror has a part for each.
struct row_part {
    ggml_tensor * tensor;
    size_t        offset, size, count, pitch, place;
};

namespace library {

memory_parts parts_of(llama_context * ctx);

// Whether layers with a window see position p from n on.
bool sees(llama_context * ctx, int64_t n, int64_t p);

// Lets `seq` start in the first plane of a recurrent part, wherever a rollback has left it.
void begin_anew(llama_memory_t recurrent, llama_seq_id seq);

// The steps in which a part writes `seq`; tensor data stays where it is.
std::vector<io_step> written(llama_memory_t part, llama_seq_id seq);

// A part reads `plain` bytes for `seq`. Returns the tensor data that it reads, for the caller to fill.
std::vector<io_step> read(llama_memory_t part, llama_seq_id seq, std::vector<uint8_t> plain);

// All parts of the rows of a tensor of the memory of `ctx`, one of a whole tensor; several with --split-mode tensor.
std::vector<row_part> parts_of_rows(llama_context * ctx, const ggml_tensor * tensor);

}  // namespace library
