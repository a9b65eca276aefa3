// Cells and rows as numbers, without the library: the bookkeeping and the plans of held rows
// are made of.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

// Cells [cell, cell + count) hold rows [row, row + count).
struct cell_run {
    int64_t cell, row, count;
};

// The row in cell `from` goes to cell `to`.
struct cell_move {
    int64_t from, to;
};

// There are too few free cells for the call; nothing has changed.
struct out_of_cells : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Joins a run to the last one if it continues it.
inline void append_run(std::vector<cell_run> & runs, const cell_run & run) {
    const bool continues = !runs.empty() && runs.back().cell + runs.back().count == run.cell &&
                           runs.back().row + runs.back().count == run.row;
    if (continues) {
        runs.back().count += run.count;
    } else {
        runs.push_back(run);
    }
}
