#include "device/relocation.h"

#include <algorithm>
#include <utility>

namespace {

// How many cells are made ready for evaluations at a time.
constexpr int64_t cells_ahead = 4096;

// How many rows of those that change places are copied at a time.
constexpr int64_t rows_in_stage = 256;

// So many turns of fewer rows than that are made.
constexpr size_t max_small_turns = 4;

// Most are sorted already.
template <typename T, typename... F> void sort(std::vector<T> & values, F... is_less) {
    if (!std::is_sorted(values.begin(), values.end(), is_less...)) {
        std::sort(values.begin(), values.end(), is_less...);
    }
}

bool is_lower(const cell_move & a, const cell_move & b) {
    return a.from < b.from;
}

// Adds one of each of `from` to one of `to`: in order, so that what lies together stays together.
void add_moves(std::vector<cell_move> & moves, std::vector<int64_t> & from, const std::vector<int64_t> & to) {
    sort(from);
    for (size_t i = 0; i < from.size(); ++i) {
        moves.push_back({ from[i], to[i] });
    }
}

}  // namespace

std::vector<cell_move> relocation::out_of(const std::vector<int64_t> & next) const {
    const int64_t        size = cache.size();
    std::vector<bool>    is_next(size);
    std::vector<int64_t> from, to;
    for (const int64_t cell : next) {
        is_next[cell] = true;
        if (held.holds(cell)) {
            from.push_back(cell);
        }
    }
    const size_t n_next = from.size();

    // What the evaluations after this one will take, as far as there are free cells above.
    const int64_t ahead_end = std::min(size, next.back() + 1 + cells_ahead);
    for (int64_t cell = next.back() + 1; cell < ahead_end; ++cell) {
        if (held.holds(cell) && cache.is_empty(cell) && !is_next[cell]) {
            from.push_back(cell);
        }
    }
    for (int64_t cell = size - 1; cell >= (to.size() < n_next ? 0 : ahead_end) && to.size() < from.size(); --cell) {
        if (is_free(cell) && !is_next[cell]) {
            to.push_back(cell);
        }
    }
    from.resize(to.size());
    std::reverse(to.begin(), to.end());
    std::vector<cell_move> moves;
    add_moves(moves, from, to);
    return moves;
}

std::vector<cell_move> relocation::into(const std::vector<cell_run> & from_runs, const std::vector<cell_run> & to_runs) const {
    std::vector<cell_move> moves;
    if (held.empty()) {
        return moves;
    }
    const int64_t        p0 = to_runs.front().row;
    std::vector<int64_t> cell_of;  // of each row from p0 on
    for (const cell_run & run : to_runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            cell_of.push_back(run.cell + i);
        }
    }
    moves.reserve(2 * cell_of.size());
    std::vector<bool> is_source(cache.size());
    for (const cell_run & run : from_runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            const int64_t from = run.cell + i, to = cell_of[run.row + i - p0];
            is_source[from] = true;
            if (from != to) {
                moves.push_back({ from, to });
            }
        }
    }
    std::vector<int64_t> from, to;
    for (const int64_t cell : cell_of) {
        if (held.holds(cell) && !is_source[cell]) {
            from.push_back(cell);
        }
    }
    for (int64_t cell = cache.size() - 1; cell >= 0 && to.size() < from.size(); --cell) {
        if (is_free(cell)) {
            to.push_back(cell);
        }
    }
    std::reverse(to.begin(), to.end());
    if (to.size() < from.size()) {
        // Others go to cells that are left when all before them have gone, so that no row waits for itself.
        std::vector<int64_t> few;
        if (to.size() < static_cast<size_t>(rows_in_stage)) {
            few.swap(to);  // so few would take too many turns: rows change places instead, as far as they can
        }
        std::vector<int64_t> filled_from(cache.size(), -1);
        for (const cell_move & move : moves) {
            filled_from[move.to] = move.from;
        }
        for (size_t i = 0; i < cell_of.size() && to.size() < from.size(); ++i) {
            int64_t last = cell_of[i];
            while (filled_from[last] >= 0 && !is_source[cell_of[i]]) {
                last = filled_from[last];
            }
            if (last != cell_of[i] && cache.is_empty(last)) {
                to.push_back(last);
            }
        }
        to.insert(to.end(), few.begin(), few.begin() + std::min(few.size(), from.size() - to.size()));
    }
    if (to.size() < from.size()) {
        throw out_of_cells("there are too few cells for the held rows");
    }
    add_moves(moves, from, to);
    return moves;
}

void relocation::run(const std::vector<cell_move> & moves) {
    std::vector<bool> leaves(cache.size());
    for (const cell_move & move : moves) {
        leaves[move.from] = true;
    }
    // First those whose cells are free, then those whose cells these have left: so no turn has more rows than the one
    // before it. Many small ones take longer than an exchange of the rest.
    std::vector<std::vector<cell_move>> turns(1);
    std::vector<int64_t>                waits(cache.size(), -1);  // for each cell, which move waits until it is left
    std::vector<cell_move>              rest;
    for (size_t i = 0; i < moves.size(); ++i) {
        if (leaves[moves[i].to]) {
            waits[moves[i].to] = static_cast<int64_t>(i);
        } else {
            turns[0].push_back(moves[i]);
        }
    }
    while (rest.empty() && !turns.back().empty()) {
        std::vector<cell_move> next;
        for (const cell_move & move : turns.back()) {
            if (const int64_t i = std::exchange(waits[move.from], -1); i >= 0) {
                next.push_back(moves[i]);
            }
        }
        const bool is_small = turns.size() >= max_small_turns && next.size() < static_cast<size_t>(rows_in_stage);
        if (is_small && !next.empty()) {
            rest = std::move(next);
        } else {
            turns.push_back(std::move(next));
        }
    }
    for (const int64_t i : waits) {
        if (i >= 0) {
            rest.push_back(moves[i]);
        }
    }
    if (!rest.empty()) {
        open_stages();  // may throw, before anything has moved
    }
    copies.move_begin();
    for (std::vector<cell_move> & turn : turns) {
        copy(std::move(turn), planes, planes);
    }
    if (!rest.empty()) {
        exchange(rest);
    }
    held.moved(moves);
}

// `moves` are sorted or not; no cell is both left and filled.
void relocation::copy(std::vector<cell_move> moves, std::vector<plane> & source, std::vector<plane> & target) {
    sort(moves, is_lower);
    for (size_t i = 0, n; i < moves.size(); i += n) {
        // As many as copy neighbours to neighbours.
        const auto [from, to] = moves[i];
        for (n = 1; i + n < moves.size() && moves[i + n].from == from + static_cast<int64_t>(n) &&
                    moves[i + n].to == to + static_cast<int64_t>(n);) {
            ++n;
        }
        for (size_t p = 0; p < planes.size(); ++p) {
            copies.move(source[p].cells(from, n), target[p].cells(to, n));
        }
    }
}

void relocation::open_stages() {
    if (!stages.empty()) {
        return;
    }
    std::vector<tensor_buffer> buffers;
    std::vector<plane>         opened;
    for (size_t i = 0; i < planes.size(); ++i) {
        const size_t stride = planes[i].row * (rows_in_stage + 1);
        buffers.push_back(allocate_zeros(ggml_backend_buffer_get_type(planes[i].tensor.buffer), planes[i].count * stride));
        opened.push_back({ buffers[i].bytes, planes[i].row, planes[i].count, stride });
    }
    stage_buffers = std::move(buffers);
    stages        = std::move(opened);
}

// Rows whose cells are left by others of them: some at a time, all of these read before the first is written. The rows
// of a ring go one after the other, each into the cell that the last one has left; where that takes several times, what
// lies in the first of these cells is put aside.
void relocation::exchange(const std::vector<cell_move> & moves) {
    constexpr int64_t put_aside = rows_in_stage;  // a place of the stage
    constexpr int64_t nowhere   = -1;

    std::vector<cell_move> some;  // those from `nowhere` are of the row that was put aside
    const auto             flush = [&] {
        sort(some, is_lower);
        std::vector<cell_move> in, out;
        for (size_t i = 0; i < some.size(); ++i) {
            const auto place = static_cast<int64_t>(i);
            if (some[i].from != nowhere) {
                in.push_back({ some[i].from, place });
            }
            out.push_back({ some[i].from != nowhere ? place : put_aside, some[i].to });
        }
        copy(std::move(in), planes, stages);
        copy(std::move(out), stages, planes);
        some.clear();
    };

    std::vector<int64_t> source(cache.size(), nowhere);  // of each cell, where its new row lies
    std::vector<bool>    leaves(cache.size());
    for (const cell_move & move : moves) {
        source[move.to]   = move.from;
        leaves[move.from] = true;
    }
    for (const bool is_ring : { false, true }) {  // these are left when all that end in a free cell are done
        for (const cell_move & first : moves) {
            std::vector<cell_move> chain;
            for (int64_t to = first.to; leaves[first.to] == is_ring && source[to] != nowhere; to = chain.back().from) {
                chain.push_back({ std::exchange(source[to], nowhere), to });
            }
            if (some.size() + chain.size() > static_cast<size_t>(rows_in_stage)) {
                flush();
            }
            if (is_ring && chain.size() > static_cast<size_t>(rows_in_stage)) {
                copy({ { first.to, put_aside } }, planes, stages);
                chain.back().from = nowhere;
            }
            for (const cell_move & move : chain) {
                some.push_back(move);
                if (some.size() == static_cast<size_t>(rows_in_stage)) {
                    flush();
                }
            }
        }
    }
    flush();
}
