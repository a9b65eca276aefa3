// Executes plans of relocation_plan.h: copies held rows from cell to cell on the device.
//
// The copies of one step may be made in any order, and steps follow each other on the stream that
// computes (`transfer::move`), after the evaluations before them and before those after them. The
// caller fences saves that still read the rows where they are. Scratch memory is allocated before
// the first copy: a call that throws has moved nothing.
#pragma once

#include "device/held_rows.h"
#include "device/relocation_plan.h"
#include "device/transfer.h"

// The cells of a cache, some of which have held rows; both must outlive this.
class cache_cells final : public cell_map {
public:
    cache_cells(const library::cache & cache, const held_rows & held) : cache(cache), held(held) {}

    int64_t size() const override { return cache.size(); }
    bool    is_empty(int64_t cell) const override { return cache.is_empty(cell); }
    bool    is_held(int64_t cell) const override { return held.holds(cell); }

private:
    library::cache    cache;
    const held_rows & held;
};

class relocation {
public:
    // `planes` have the rows of the cells of `held`; all arguments must outlive this.
    relocation(std::vector<plane> & planes, held_rows & held, transfer & copies)
        : planes(planes), held(held), copies(copies) {}

    // Makes the moves of `moves_out_of` or `moves_into` in `n_cells` cells. Throws
    // std::runtime_error without memory, before a row has moved.
    void run(const std::vector<cell_move> & moves, int64_t n_cells);

private:
    void open_scratch();
    void copy(const copy_step & step);

    std::vector<plane> &       planes;
    held_rows &                held;
    transfer &                 copies;
    std::vector<tensor_buffer> scratch_buffers;
    std::vector<plane>         scratch;  // scratch rows of each plane; none until they are needed
};
