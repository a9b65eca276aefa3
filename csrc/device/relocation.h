// Relocates held rows on the device: out of the cells that the library takes next, and into those that it has taken for
// them. Both are planned first; only `run` changes anything.
#pragma once

#include "device/held_rows.h"
#include "device/transfer.h"

class relocation {
public:
    // All must outlive this: `planes` have the bytes of the cells of `cache`.
    relocation(const library::cache & cache, std::vector<plane> & planes, held_rows & held, transfer & copies)
        : cache(cache), planes(planes), held(held), copies(copies) {}

    // After these moves nothing is held in the cells `next`, for each of which one is free, nor, as far as cells above
    // them are free, in those that later evaluations take.
    std::vector<cell_move> out_of(const std::vector<int64_t> & next) const;

    // After these the held rows that lie in `from` are in the cells that were taken for them among `to`, and what else
    // was held there is in other cells; or out_of_cells.
    std::vector<cell_move> into(const std::vector<cell_run> & from, const std::vector<cell_run> & to) const;

    // Each row goes where it shall be, on the stream that computes (`transfer::move`): no two go to one cell, and none to
    // one that another row needs. std::runtime_error without memory, before anything has moved.
    void run(const std::vector<cell_move> & moves);

private:
    bool is_free(int64_t cell) const { return cache.is_empty(cell) && !held.holds(cell); }
    void copy(std::vector<cell_move> moves, std::vector<plane> & source, std::vector<plane> & target);
    void open_stages();
    void exchange(const std::vector<cell_move> & moves);

    library::cache             cache;
    std::vector<plane> &       planes;
    held_rows &                held;
    transfer &                 copies;
    std::vector<tensor_buffer> stage_buffers;
    std::vector<plane>         stages;  // room for some rows of each plane, once they were needed
};
