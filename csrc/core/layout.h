// The layout of a context's memory: which of its parts can be moved on their own, and the types and sizes of
// everything in them. Read from the library's bytes of a sequence, so nothing here depends on an architecture.
#pragma once

#include "device/transfer.h"
#include "library/memory.h"

#include <map>
#include <stdexcept>

// One attention tensor: rows of `row` bytes, or, transposed, `n_embd` runs of `row`-byte elements.
struct row_tensor {
    int32_t               type;
    size_t                row;
    size_t                n_embd;  // 1 unless transposed
    std::vector<row_part> parts = {};

    size_t per_token() const { return row * n_embd; }
};

// K and V of row sets, one set after the other. `has_ext`: cells also hold a cell_extra. `is_2d`: with a line and a column.
// `values` is the rest that the library writes about one whole cache, such as the rotation of its rows.
struct row_layout {
    bool                    has_ext      = false;
    bool                    is_2d        = false;
    bool                    v_transposed = false;
    std::vector<row_tensor> k, v;
    std::vector<uint32_t>   values = {};

    void   add(const row_layout & set);
    size_t ext_bytes() const { return has_ext ? sizeof(cell_extra) : 0; }  // of one token
    size_t row_bytes() const;  // of one token over all tensors, `ext_bytes` included
};

using tensor_parts = std::map<const ggml_tensor *, std::vector<row_part>>;

// Where the tensor data among `steps` lies, one row of each tensor.
std::vector<copy_region> regions_of(const std::vector<io_step> & steps, const tensor_parts & parts);

// Everything that decides the meaning of saved bytes: equal texts may exchange blocks. `recurrent` is the library's bytes of
// the one recurrent cell of a sequence, `parts` its tensors', `hash` is FNV-1a of the text.
struct memory_layout {
    row_layout           rows, window;
    std::vector<io_step> recurrent;
    tensor_parts         parts;
    std::string          text;
    uint64_t             hash = 0;

    std::vector<ggml_tensor *> tensors() const;
};

// `seq` must hold at least one token, else std::invalid_argument; std::runtime_error if the library writes in an unknown
// order. Nothing is known of an opaque memory.
memory_layout layout_of(llama_context * ctx, const memory_parts & parts, llama_seq_id seq);
