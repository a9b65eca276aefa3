// Caches of the library: cells, each with the row of one token.
#pragma once

#include "llama-kv-cells.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// What a cell has beside its position. Bytes of these are in files, see core/block.h.
struct cell_extra {
    int32_t x, y, token;
};
static_assert(sizeof(cell_extra) == 12 && offsetof(cell_extra, y) == 4 && offsetof(cell_extra, token) == 8);

namespace library {

// A cache that is a memory, or a part of one, which it must not outlive: a copy is the same cache. What the public functions
// do to `memory()`, they do to it. Cells and sequence ids are the caller's to check.
class cache {
public:
    cache() = default;  // none
    cache(llama_memory_t memory);

    explicit operator bool() const { return owner != nullptr; }

    llama_memory_t memory() const { return owner; }

    int64_t size() const { return cells->size(); }  // in cells
    int64_t n_used() const { return cells->get_used(); }
    bool    has_extra() const;  // whether cells have something beside their positions that saved rows need

    bool      is_empty(int64_t cell) const { return cells->is_empty(at(cell)); }
    llama_pos position(int64_t cell) const { return cells->pos_get(at(cell)); }  // of one that is not empty

    cell_extra extra(int64_t cell) const {
        const auto & ext = cells->ext_get(at(cell));
        return { ext.x, ext.y, ext.tok };
    }
    void set_extra(int64_t cell, const cell_extra & extra) { cells->ext_set(at(cell), { extra.x, extra.y, extra.token }); }

    // Whether `seq` has the cell at a position in [p0, p1), and whether no other sequence has it.
    bool has(int64_t cell, llama_seq_id seq, llama_pos p0, llama_pos p1) const {
        return cells->pos_in(at(cell), p0, p1) && cells->seq_has(at(cell), seq);
    }
    bool has_alone(int64_t cell, llama_seq_id seq) const {
        return cells->seq_has(at(cell), seq) && cells->seq_count(at(cell)) == 1;
    }

    // The cells that the library would give to n tokens now; none if there are too few.
    std::vector<int64_t> find(int64_t n) const;

    // Gives these cells to text of `seq` at `positions`, as an evaluation would; what is in them is dropped.
    void take(const std::vector<int64_t> & taken, llama_seq_id seq, std::vector<llama_pos> positions);

private:
    static uint32_t at(int64_t cell) { return static_cast<uint32_t>(cell); }

    llama_memory_t   owner = nullptr;
    llama_kv_cells * cells = nullptr;  // of the one stream that there is
};

}  // namespace library
