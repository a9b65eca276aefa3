// What the memory of a context looks like: which of its parts can be moved on their own, and the types and sizes of
// everything in them. Read from what the library writes for a sequence, so nothing here depends on an architecture.
#pragma once

#include "core/state_io.h"

// attention: rows only. hybrid: a state, and rows unless the memory is recurrent alone. opaque: anything else; only the
// library can save it.
enum class memory_kind { attention, hybrid, opaque };

// A cache whose rows grow with the tokens and can be cut anywhere. Of an indexer only the keys may be used.
struct row_set {
    llama_kv_cache * cache;
    bool             keys_only = false;
};

// The parts of a memory, which belong to the context. All `sets` have the row of a token in the same cell; an opaque
// memory has none. `recurrent` and `window`, the cache of layers that see the last `n_seen` tokens or a chunk of so many,
// are null where there is none. `type` is the name of the memory's class.
struct memory_parts {
    memory_kind              kind = memory_kind::opaque;
    std::vector<row_set>     sets;
    llama_memory_recurrent * recurrent = nullptr;
    llama_kv_cache *         window    = nullptr;
    int64_t                  n_seen    = 0;
    std::string              type;
};

memory_parts parts_of(llama_context * ctx);

// One attention tensor: rows of `row` bytes, or, transposed, `n_embd` runs of `row`-byte elements.
struct row_tensor {
    ggml_tensor * tensor;
    int32_t       type;
    size_t        row;
    size_t        n_embd;  // 1 unless transposed

    size_t per_token() const { return row * n_embd; }
};

// K and V of row sets, one set after the other. `has_ext`: cells hold a llama_kv_cell_ext, too. `is_2d`: with a line and a
// column.
struct row_layout {
    bool                    has_ext      = false;
    bool                    is_2d        = false;
    bool                    v_transposed = false;
    std::vector<row_tensor> k, v;

    void   add(const row_layout & set);
    size_t ext_bytes() const { return has_ext ? sizeof(llama_kv_cell_ext) : 0; }  // of one token
    size_t row_bytes() const;  // of one token over all tensors, `ext_bytes` included
};

// What the library writes for the one recurrent cell of a sequence; `n_bytes` counts the tensors only.
struct recurrent_layout {
    std::vector<io_step> steps;
    size_t               n_bytes = 0;
};

// Everything that decides what saved bytes mean: equal texts may exchange blocks. `hash` is FNV-1a of the text.
struct memory_layout {
    row_layout       rows, window;
    recurrent_layout recurrent;
    std::string      text;
    uint64_t         hash = 0;

    std::vector<ggml_tensor *> tensors() const;
};

// `seq` must hold at least one token, else std::invalid_argument; std::runtime_error if the library writes in an unknown
// order. Nothing is known of an opaque memory.
memory_layout layout_of(llama_context * ctx, const memory_parts & parts, llama_seq_id seq);
