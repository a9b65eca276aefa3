// Rows of attention caches: out of a sequence into a block, and from blocks to the end of a sequence.
//
// A sequence's rows are numbered 0, 1, 2 ... in the order of its tokens; which positions the library has them at, where
// there are images, is in `row_positions`. Only `planes` has the place of the bytes on the device.
//
// Rows can also be held: they stay on the device when their sequence has gone. The library takes their cells for free
// ones, so that they cost its computation nothing, and before it gets such a cell its row is copied to another one.
#pragma once

#include "core/cells.h"
#include "core/row_memory.h"
#include "core/row_positions.h"
#include "device/relocation.h"

class attention_rows final : public row_memory {
public:
    // `memory`, of which `sets` are parts, must outlive this. With `defers`, the library learns of dropped rows in `reserve`,
    // without which nothing may be evaluated then: so those that are loaded next take over their cells, and the library's
    // bookkeeping, which is slow, stays as they are.
    attention_rows(llama_memory_t memory, const std::vector<row_set> & sets, const row_layout & layout, uint64_t hash,
                   transfer & copies, bool defers);

    int64_t end_of(llama_seq_id seq) const override;
    int64_t position(llama_seq_id seq, int64_t n) const override { return positions_of(seq).position(n); }
    void    add_image(llama_seq_id seq, int64_t columns, int64_t count) override;
    void    load_checked(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) override;
    void    truncate(llama_seq_id seq, int64_t n) override;

    held_rows::handle hold(llama_seq_id seq, int64_t p0, int64_t p1) override;
    int64_t           n_free() const override;  // counted once between two changes
    int64_t           n_held() const override;
    void              reserve(int64_t n, bool in_parts) override;

private:
    int64_t position_after(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const override;
    void    copy_out(const std::vector<cell_run> & runs, int64_t p0, int64_t p1, uint8_t * out) override;

    bool is_vacant(int64_t cell) const override {  // in loops over all cells, hence here
        return cache.is_empty(cell) || (cut_seq >= 0 && cache.position(cell) >= cut_pos && cache.has_alone(cell, cut_seq));
    }

    void                  settle();
    std::vector<cell_run> runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const;
    row_positions         appended(const row_positions & positions, const std::vector<row_span> & spans) const;
    void                  append(const std::vector<cell_run> & runs, const std::vector<row_span> & spans);
    std::vector<cell_run> take_over(llama_seq_id seq, int64_t p0, int64_t last);
    const row_positions & positions_of(llama_seq_id seq) const { return positions[static_cast<size_t>(seq)]; }
    void                  remove(llama_seq_id seq, int64_t pos);
    llama_pos             last_of(llama_seq_id seq) const { return llama_memory_seq_pos_max(cache.memory(), seq); }
    void                  changed() { is_counted = false; }
    void                  count() const;
    std::vector<cell_run> claim_cells(llama_seq_id seq, int64_t p0, int64_t last);
    void                  check_free(int64_t n) const;
    int64_t               n_needed(const std::vector<row_span> & spans) const;

    std::vector<cell_run> held_runs(const std::vector<row_span> & spans) const;
    void                  relocate(const std::vector<cell_move> & moves);

    llama_memory_t       memory;
    std::vector<row_set> sets;
    library::cache       cache;  // the first of them: where it has a row, the others have theirs
    std::vector<plane>   planes;  // in the order of a block's bytes
    cache_cells          cells;
    relocation           relocating;

    std::vector<row_positions> positions;  // of each sequence
    bool               defers;
    llama_seq_id       cut_seq     = -1;     // dropped rows that are not settled: its rows from cut_at on
    int64_t            cut_at      = 0;
    int64_t            cut_pos     = 0;      // the position of that row
    mutable bool       is_counted  = true;  // whether n_only_held and n_cut are as of now
    mutable int64_t    n_cut       = 0;  // unsettled cells, counted with them
};
