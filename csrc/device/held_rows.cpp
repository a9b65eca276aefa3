#include "device/held_rows.h"

#include "core/block.h"

#include <algorithm>
#include <atomic>

namespace {

held_rows::handle next_handle() {
    static std::atomic<held_rows::handle> last{ 0 };
    return ++last;
}

}  // namespace

void append_run(std::vector<cell_run> & runs, const cell_run & run) {
    if (!runs.empty() && runs.back().cell + runs.back().count == run.cell && runs.back().row + runs.back().count == run.row) {
        runs.back().count += run.count;
    } else {
        runs.push_back(run);
    }
}

held_rows::handle held_rows::add(int64_t p0, int64_t p1, std::vector<cell_run> runs, std::vector<cell_extra> exts) {
    std::sort(runs.begin(), runs.end(), [](const cell_run & a, const cell_run & b) { return a.row < b.row; });
    const handle held = next_handle();
    const entry & added = entries.emplace(held, entry{ p0, p1, std::move(runs), std::move(exts) }).first->second;
    for (const cell_run & run : added.runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            ++holders[run.cell + i];
        }
    }
    return held;
}

void held_rows::release(handle held) {
    for (const cell_run & run : at(held).runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            --holders[run.cell + i];
        }
    }
    entries.erase(held);
}

const held_rows::entry & held_rows::at(handle held) const {
    const auto found = entries.find(held);
    if (found == entries.end()) {
        throw std::invalid_argument("these rows are not held any more");
    }
    return found->second;
}

std::vector<cell_run> held_rows::runs_of(handle held, int64_t first, int64_t last) const {
    const entry & rows = at(held);
    if (first < rows.p0 || last > rows.p1 || last <= first) {
        throw std::invalid_argument("rows " + range_text(first, last) + " are not inside the held " +
                                    range_text(rows.p0, rows.p1));
    }
    std::vector<cell_run> runs;
    for (const cell_run & run : rows.runs) {
        const int64_t from = std::max(run.row, first);
        const int64_t to   = std::min(run.row + run.count, last);
        if (from < to) {
            runs.push_back({ run.cell + (from - run.row), from, to - from });
        }
    }
    return runs;
}

const cell_extra * held_rows::exts_of(handle held, int64_t first) const {
    const entry & rows = at(held);
    return &rows.exts.at(static_cast<size_t>(first - rows.p0));
}

void held_rows::moved(const std::vector<cell_move> & moves) {
    std::vector<uint32_t> carried;
    carried.reserve(moves.size());
    for (const cell_move & move : moves) {
        carried.push_back(holders[move.from]);
        target[move.from] = move.to;
    }
    for (const cell_move & move : moves) {
        holders[move.from] = 0;
    }
    for (size_t i = 0; i < moves.size(); ++i) {
        holders[moves[i].to] = carried[i];
    }
    for (auto & [_, rows] : entries) {
        std::vector<cell_run> runs;
        bool                  changed = false;
        for (const cell_run & run : rows.runs) {
            for (int64_t i = 0, n; i < run.count; i += n) {
                // As many as stay together: those that stay where they are, or go to cells that follow each other.
                const int64_t to = target[run.cell + i];
                for (n = 1; i + n < run.count && target[run.cell + i + n] == (to < 0 ? -1 : to + n);) {
                    ++n;
                }
                changed = changed || to >= 0;
                append_run(runs, { to < 0 ? run.cell + i : to, run.row + i, n });
            }
        }
        if (changed) {
            rows.runs = std::move(runs);
        }
    }
    for (const cell_move & move : moves) {
        target[move.from] = -1;
    }
}
