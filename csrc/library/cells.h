// Caches of the library: cells, each with the row of one token.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class llama_kv_cells;

// What a cell has beside its position. Bytes of these are in files, see core/block.h.
struct cell_extra {
    int32_t x, y, token;
};
static_assert(sizeof(cell_extra) == 12 && offsetof(cell_extra, x) == 0 && offsetof(cell_extra, y) == 4 &&
              offsetof(cell_extra, token) == 8);
static_assert(sizeof(llama_pos) == 4 && sizeof(llama_token) == 4 && sizeof(llama_seq_id) == 4);

namespace library {

// A cache that is a memory, or a part of one, which it must not outlive. A copy is the same cache, and public functions
// on `memory()`, such as to drop rows, act on it. Cells and sequence ids are the caller's to check; those of a cache that is
// not unified mean nothing.
class cache {
public:
    cache() = default;  // none
    explicit cache(llama_memory_t memory);

    explicit operator bool() const { return owner != nullptr; }

    llama_memory_t memory() const { return owner; }

    int64_t size() const;       // in cells
    int64_t n_used() const;
    bool    is_unified() const;  // whether all sequences share its cells
    bool    has_extra() const;  // whether cells have something beside their positions that saved rows need

    bool       is_empty(int64_t cell) const { return position(cell) < 0; }
    llama_pos  position(int64_t cell) const;  // -1 for none
    cell_extra extra(int64_t cell) const;     // of one that is not empty
    void       set_extra(int64_t cell, const cell_extra & extra);

    // Whether `seq` has the cell and a position in [p0, p1) there; whether it has the cell and no other sequence does.
    bool has(int64_t cell, llama_seq_id seq, llama_pos p0, llama_pos p1) const;
    bool has_alone(int64_t cell, llama_seq_id seq) const;

    // The cells that the library would give to n tokens now; none if there are too few.
    std::vector<int64_t> find(int64_t n) const;

    // Gives these cells to text of `seq` at `positions`, as an evaluation would; what is in them is dropped.
    void take(const std::vector<int64_t> & cells, llama_seq_id seq, std::vector<llama_pos> positions);

private:
    llama_memory_t   owner = nullptr;
    llama_kv_cells * books = nullptr;
};

}  // namespace library
