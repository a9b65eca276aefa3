#include "device/held_rows.h"

#include "core/block.h"

#include <atomic>

held_rows::handle held_rows::add(int64_t p0, int64_t p1, const std::vector<cell_run> & runs,
                                 std::vector<cell_extra> exts) {
    static std::atomic<handle> last{ 0 };
    entry added{ p0, std::vector<int64_t>(p1 - p0), std::move(exts) };
    for (const cell_run & run : runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            added.cells[run.row + i - p0] = run.cell + i;
            ++holders[run.cell + i];
        }
    }
    return entries.emplace(++last, std::move(added)).first->first;
}

void held_rows::release(handle held) {
    for (const int64_t cell : at(held).cells) {
        --holders[cell];
    }
    entries.erase(held);
}

const held_rows::entry & held_rows::at(handle held) const {
    const auto found = entries.find(held);
    if (found == entries.end()) {
        throw std::invalid_argument("these rows are no longer held");
    }
    return found->second;
}

std::vector<cell_run> held_rows::runs_of(handle held, int64_t first, int64_t last) const {
    const entry & rows = at(held);
    if (first < rows.p0 || last > rows.end() || last <= first) {
        throw std::invalid_argument("rows " + range_text(first, last) +
                                    " are not inside the held " + range_text(rows.p0, rows.end()));
    }
    std::vector<cell_run> runs;
    for (int64_t row = first; row < last; ++row) {
        append_run(runs, { rows.cells[row - rows.p0], row, 1 });
    }
    return runs;
}

const cell_extra * held_rows::exts_of(handle held, int64_t first) const {
    const entry & rows = at(held);
    return &rows.exts.at(static_cast<size_t>(first - rows.p0));
}

void held_rows::moved(const std::vector<cell_move> & moves) {
    std::vector<int64_t> target(holders.size(), -1);
    for (const cell_move & move : moves) {
        target[move.from] = move.to;
    }
    for (auto & [_, rows] : entries) {
        for (int64_t & cell : rows.cells) {
            if (target[cell] >= 0) {
                --holders[cell];
                cell = target[cell];
                ++holders[cell];
            }
        }
    }
}
