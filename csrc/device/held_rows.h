// Bookkeeping of held rows: the cells that keep rows for a caller, independent of the library's
// sequences. A caller that overwrites such a cell copies its bytes first and reports the new cell.
#pragma once

#include "device/cell_runs.h"
#include "library/cells.h"

#include <map>
#include <utility>

class held_rows {
public:
    using handle = uint64_t;  // never given twice in a process

    explicit held_rows(size_t n_cells) : holders(n_cells, 0) {}

    // Remembers rows [p0, p1), whose places are `runs`; `exts` has one for each row, or none.
    handle add(int64_t p0, int64_t p1, const std::vector<cell_run> & runs,
               std::vector<cell_extra> exts);

    // std::invalid_argument after its release.
    void release(handle held);

    bool has(handle held) const { return entries.count(held) > 0; }
    bool empty() const { return entries.empty(); }
    bool holds(int64_t cell) const { return holders[cell] > 0; }

    // How many handles have the row in `cell`.
    uint32_t count(int64_t cell) const { return holders[cell]; }

    // The held rows [first, second); std::invalid_argument after its release.
    std::pair<int64_t, int64_t> range_of(handle held) const {
        return { at(held).p0, at(held).end() };
    }

    // Where rows [first, last) of `held` lie, in order; std::invalid_argument if it does not have
    // them.
    std::vector<cell_run> runs_of(handle held, int64_t first, int64_t last) const;

    // The library's facts about `held` from row `first` on, which it has.
    const cell_extra * exts_of(handle held, int64_t first) const;

    // The bytes were copied, as if all at once: an owner of the row in `from` has it in `to`.
    void moved(const std::vector<cell_move> & moves);

private:
    struct entry {
        int64_t                 p0;
        std::vector<int64_t>    cells;  // of row p0 and those after it
        std::vector<cell_extra> exts;

        int64_t end() const { return p0 + static_cast<int64_t>(cells.size()); }
    };

    const entry & at(handle held) const;

    std::map<handle, entry> entries;
    std::vector<uint32_t>   holders;  // of each cell
};
