// Cells of the library's caches: where their rows lie on the device, and how the library gives them to tokens.
#pragma once

#include "core/block.h"
#include "core/layout.h"
#include "device/held_rows.h"

#include <algorithm>

// Those of `rows`, which lie in `n_cells`, in the order of a block's bytes.
std::vector<plane> planes_of(const row_layout & rows, size_t n_cells);

// Calls `move(region)` for rows [first, last), which lie in `runs`, of each plane, and their place in bytes which hold rows
// [p0, p1), plane after plane.
template <typename F>
void each_region(std::vector<plane> & planes, const std::vector<cell_run> & runs, int64_t p0, int64_t p1, int64_t first,
                 int64_t last, const F & move) {
    for (plane & plane : planes) {
        for (const cell_run & r : runs) {
            const int64_t from = std::max(r.row, first);
            const int64_t to   = std::min(r.row + r.count, last);
            if (from < to) {
                move(plane.rows(r.cell + (from - r.row), to - from, from - p0, p1 - p0));
            }
        }
    }
}

// These cells of `cache` are those of text of `seq` at `positions`, of row `p0` and those after it; out_of_cells if there are none.
std::vector<cell_run> take(library::cache cache, const std::vector<int64_t> & cells, llama_seq_id seq,
                           const std::vector<llama_pos> & positions, int64_t p0);
