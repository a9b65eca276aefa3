// Caches of the library: cells, each with the row of one token.
#pragma once

#include "llama-kv-cache.h"
#include "llama-kv-cells.h"

#include <cstdint>
#include <vector>

// The contents of a cell besides its position. Their bytes are in files, see core/block.h.
struct cell_extra {
    int32_t x, y, token;
};

namespace library {

// A cache that is a memory, or a part of one, which it must not outlive: a copy is the same cache. The public functions
// change it with `memory()`. Cells and sequence ids are the caller's to check.
class cache {
public:
    cache() = default;  // none

    // The cells of a stream are the cache's own, not a copy.
    cache(llama_kv_cache * memory) : owner(memory), cells(const_cast<llama_kv_cells *>(&memory->get_cells(0))) {}

    explicit operator bool() const { return owner != nullptr; }

    llama_kv_cache * memory() const { return owner; }

    int64_t size() const { return cells->size(); }  // in cells
    int64_t n_used() const { return cells->get_used(); }
    bool    has_extra() const { return owner->has_cell_ext(); }  // besides positions, that saved rows need

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
    std::vector<int64_t> find(int64_t n) const {
        llama_seq_id seq = 0;  // all have the same stream, and find the same cells
        llama_ubatch batch{};
        batch.n_tokens   = static_cast<uint32_t>(n);
        batch.n_seqs_unq = 1;
        batch.seq_id_unq = &seq;
        const auto found = owner->find_slot(batch, false);
        return found.empty() ? std::vector<int64_t>() : std::vector<int64_t>(found.idxs[0].begin(), found.idxs[0].end());
    }

    // Gives these cells to text of `seq` at `positions`, as an evaluation would; their content is dropped.
    void take(const std::vector<int64_t> & taken, llama_seq_id seq, std::vector<llama_pos> positions) {
        std::vector<llama_token>    tokens(positions.size());
        std::vector<int32_t>        n_seqs(positions.size(), 1);
        std::vector<llama_seq_id *> seqs(positions.size(), &seq);
        llama_ubatch                batch{};
        batch.n_tokens = batch.n_seq_tokens = static_cast<uint32_t>(positions.size());
        batch.n_seqs = batch.n_seqs_unq = batch.n_pos = 1;
        batch.token                                   = tokens.data();
        batch.pos                                     = positions.data();
        batch.n_seq_id                                = n_seqs.data();
        batch.seq_id                                  = seqs.data();
        batch.seq_id_unq                              = &seq;
        owner->apply_ubatch({ 0, 0, { 0 }, { { taken.begin(), taken.end() } } }, batch);
    }

private:
    static uint32_t at(int64_t cell) { return static_cast<uint32_t>(cell); }

    llama_kv_cache * owner = nullptr;
    llama_kv_cells * cells = nullptr;  // of the one stream that there is
};

}  // namespace library
