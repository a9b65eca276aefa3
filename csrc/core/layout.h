// What the memory of a context looks like: which of its parts can be moved on their own, and the types and sizes of
// everything in them. Read from what the library writes for a sequence, so nothing here depends on an architecture.
#pragma once

#include "core/state_io.h"

// attention: rows only. hybrid: rows and a recurrent state. opaque: anything else; only the library can save it.
enum class memory_kind { attention, hybrid, opaque };

// Attention layers that see the last `size` tokens, or the current chunk of so many, in a ring of `ring` cells.
// `size` is 0 without such layers, `ring` where it is not known.
struct sliding_window {
    int64_t size       = 0;
    int64_t ring       = 0;
    bool    is_chunked = false;
};

// The parts of a memory, which belong to the context; null where there is none. `type` is the name of its class.
struct memory_parts {
    memory_kind              kind      = memory_kind::opaque;
    llama_kv_cache *         attention = nullptr;
    llama_memory_recurrent * recurrent = nullptr;
    std::string              type;
    sliding_window           window;
};

memory_parts parts_of(llama_context * ctx);

// The recurrent part of a memory of any kind, opaque ones included; null where there is none.
llama_memory_recurrent * recurrent_memory_of(llama_context * ctx);

// One attention tensor: rows of `row` bytes, or, transposed, `n_embd` runs of `row`-byte elements.
struct row_tensor {
    ggml_tensor * tensor;
    int32_t       type;
    size_t        row;
    size_t        n_embd;  // 1 unless transposed

    size_t per_token() const { return row * n_embd; }
};

// K and V of one attention cache. `has_ext`: cells hold a llama_kv_cell_ext, too. `is_2d`: with a line and a column.
struct row_layout {
    bool                    has_ext      = false;
    bool                    is_2d        = false;
    bool                    v_transposed = false;
    std::vector<row_tensor> k, v;

    size_t ext_bytes() const;  // of one token
    size_t row_bytes() const;  // of one token over all tensors, `ext_bytes` included
};

// What the library writes for the one recurrent cell of a sequence; `n_bytes` counts the tensors only.
struct recurrent_layout {
    std::vector<io_step> steps;
    size_t               n_bytes = 0;

    std::vector<copy_region> regions() const;  // the tensors' part
};

// Everything that decides what saved bytes mean: equal texts may exchange blocks. `hash` is FNV-1a of the text.
struct memory_layout {
    row_layout       rows;
    recurrent_layout recurrent;
    std::string      text;
    uint64_t         hash = 0;

    std::vector<ggml_tensor *> tensors() const;
};

// `seq` must hold at least one token, else std::invalid_argument; std::runtime_error if the library writes in an unknown
// order. Nothing is known of an opaque memory.
memory_layout layout_of(llama_context * ctx, const memory_parts & parts, llama_seq_id seq);
