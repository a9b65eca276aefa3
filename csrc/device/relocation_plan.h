// Plans how held rows change cells: arithmetic on cell numbers, without the library or a device.
//
// The library takes the cells of held rows for free ones, so these rows leave before it gets the
// cells. A plan has two parts, and nothing is copied before both are made:
//
//   which row goes where   `moves_out_of` and `moves_into` return moves. No two of them fill the
//                          same cell; a cell may be both left and filled.
//   in which order         `plan_copies` returns steps, which are executed one after the other.
//
// A row may be copied into a cell only after the row in there was read. So moves form chains, of
// which the first move fills a free cell and each other one the cell that the move before it has
// left, and rings, in which each move waits for another.
//
//   turns      The first turn has the first move of each chain, the next turn the second moves, and
//              so on. Within a turn no cell is both read and written: its rows are copied from cell
//              to cell, in any order. No turn has more rows than the one before it, and copies of
//              few rows are slow, so only the first turns may be small.
//   exchanges  The rest of the chains, and the rings, pass through scratch memory in batches: all
//              rows of a batch are read before the first is written. Of a chain, each batch
//              overwrites cells that it or an earlier batch has read. A ring that is longer than a batch
//              has no such start: the row in the cell that it fills first is set aside, in one more
//              scratch row, until the others have moved.
#pragma once

#include "device/cell_runs.h"

// The rows of a batch in scratch memory. One more follows them, for the row that is set aside.
constexpr int64_t n_scratch_rows = 256;

// The cells of a cache, as plans need them.
class cell_map {
public:
    virtual int64_t size() const                 = 0;
    virtual bool    is_empty(int64_t cell) const = 0;  // no sequence has it
    virtual bool    is_held(int64_t cell) const  = 0;

    bool is_free(int64_t cell) const { return is_empty(cell) && !is_held(cell); }

protected:
    ~cell_map() = default;
};

// Returns moves after which no held row is in the cells `next`; for each of them a cell must be
// free. As far as cells above are free, held rows also leave the cells that later evaluations take.
std::vector<cell_move> moves_out_of(const std::vector<int64_t> & next, const cell_map & cells);

// Returns moves after which the held rows `from` are in the cells that the library has taken for
// them, which `to` has, all rows in order. Other rows that are held in `to` go elsewhere. Throws
// out_of_cells.
std::vector<cell_move> moves_into(const std::vector<cell_run> & from,
                                  const std::vector<cell_run> & to, const cell_map & cells);

// Rows from `from` on go to `to` and the places after it: cells, or rows of scratch memory.
struct copy_run {
    int64_t from, to, count;
};

enum class copy_kind { cells_to_cells, cells_to_scratch, scratch_to_cells };

// Copies whose order does not matter.
struct copy_step {
    copy_kind             kind;
    std::vector<copy_run> runs;
};

struct copy_plan {
    std::vector<copy_step> steps;  // in the order of their execution
    bool                   needs_scratch = false;
};

// Orders `moves` of rows in `n_cells` cells, of which no two fill the same cell.
copy_plan plan_copies(const std::vector<cell_move> & moves, int64_t n_cells);
