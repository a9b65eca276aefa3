#include "device/relocation.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace {

// How many cells are made ready for evaluations at a time.
constexpr int64_t cells_ahead = 4096;

// How many rows of those that change places are copied at a time.
constexpr int64_t rows_in_stage = 256;

// So many turns of fewer rows than that are made.
constexpr size_t most_small_turns = 4;

// Most are sorted already.
template <typename T, typename... F> void sort(std::vector<T> & values, F... is_less) {
    if (!std::is_sorted(values.begin(), values.end(), is_less...)) {
        std::sort(values.begin(), values.end(), is_less...);
    }
}

bool is_lower(const cell_move & a, const cell_move & b) {
    return a.from < b.from;
}

}  // namespace

std::vector<cell_move> relocation::out_of(const std::vector<int64_t> & next) const {
    const int64_t        size = cache.size();
    std::vector<bool>    is_next(size);
    std::vector<int64_t> from, ahead, to;
    for (const int64_t cell : next) {
        is_next[cell] = true;
        if (held.holds(cell)) {
            from.push_back(cell);
        }
    }

    // What the evaluations after this one will take, as far as there are free cells above.
    const int64_t ahead_end = std::min(size, next.back() + 1 + cells_ahead);
    for (int64_t cell = next.back() + 1; cell < ahead_end; ++cell) {
        if (held.holds(cell) && cache.is_empty(cell) && !is_next[cell]) {
            ahead.push_back(cell);
        }
    }
    for (int64_t cell = size - 1; cell >= 0 && to.size() < from.size() + ahead.size(); --cell) {
        if (cell < ahead_end && to.size() >= from.size()) {
            break;
        }
        if (is_free(cell) && !is_next[cell]) {
            to.push_back(cell);
        }
    }
    ahead.resize(std::min(ahead.size(), to.size() - from.size()));
    from.insert(from.end(), ahead.begin(), ahead.end());

    // In order, so that what lies together stays together.
    sort(from);
    std::reverse(to.begin(), to.end());
    std::vector<cell_move> moves;
    moves.reserve(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
        moves.push_back({ from[i], to[i] });
    }
    return moves;
}

// Adds to the free cells `to` such that `moves` leave, one for each of `from`, what else is held in the cells `filled`.
void relocation::add_left_cells(std::vector<int64_t> & to, const std::vector<int64_t> & from,
                                const std::vector<cell_move> & moves, const std::vector<int64_t> & filled) const {
    std::vector<int64_t> filled_from(cache.size(), -1);
    for (const cell_move & move : moves) {
        filled_from[move.to] = move.from;
    }
    std::vector<int64_t> few;
    if (to.size() < static_cast<size_t>(rows_in_stage)) {
        few.swap(to);  // so few would take too many turns: rows change places instead, as far as they can
    }
    // Each of the others goes to a cell that is left when one before it has gone, so that no row waits for itself.
    const auto left_for = [&](int64_t cell) {
        while (filled_from[cell] >= 0) {
            cell = filled_from[cell];
        }
        return cell;
    };
    const auto add_left = [&](int64_t cell) {
        const int64_t last = left_for(cell);
        if (to.size() < from.size() && last != cell && cache.is_empty(last)) {
            to.push_back(last);
        }
    };
    for (const int64_t cell : filled) {
        if (to.size() < from.size() && !held.holds(cell)) {
            add_left(cell);
        }
    }
    for (const int64_t cell : from) {
        add_left(cell);
    }
    to.insert(to.end(), few.begin(), few.begin() + std::min(few.size(), from.size() - to.size()));
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
    sort(from);
    to.reserve(from.size());
    for (int64_t cell = cache.size() - 1; cell >= 0 && to.size() < from.size(); --cell) {
        if (is_free(cell)) {
            to.push_back(cell);
        }
    }
    std::reverse(to.begin(), to.end());
    if (to.size() < from.size()) {
        add_left_cells(to, from, moves, cell_of);
    }
    if (to.size() < from.size()) {
        throw out_of_cells("there are too few cells for what is held");
    }
    for (size_t i = 0; i < from.size(); ++i) {
        moves.push_back({ from[i], to[i] });
    }
    return moves;
}

void relocation::run(const std::vector<cell_move> & moves) {
    std::vector<bool> leaves(cache.size());
    for (const cell_move & move : moves) {
        leaves[move.from] = true;
    }
    // First those whose cells are free, then those whose cells these have left.
    std::vector<cell_move> ready;
    ready.reserve(moves.size());
    std::vector<int64_t> waits(cache.size(), -1);  // for each cell, which move waits until it is left
    for (size_t i = 0; i < moves.size(); ++i) {
        if (leaves[moves[i].to]) {
            waits[moves[i].to] = static_cast<int64_t>(i);
        } else {
            ready.push_back(moves[i]);
        }
    }
    std::vector<std::vector<cell_move>> turns;
    while (!ready.empty()) {
        std::vector<cell_move> next;
        next.reserve(ready.size());
        for (const cell_move & move : ready) {
            if (waits[move.from] >= 0) {
                next.push_back(moves[waits[move.from]]);
                waits[move.from] = -1;
            }
        }
        turns.push_back(std::move(ready));
        ready = std::move(next);
    }
    // No turn has more rows than the one before it; many small ones take longer than an exchange.
    size_t n_turns = 0;
    while (n_turns < turns.size() &&
           (n_turns < most_small_turns || turns[n_turns].size() >= static_cast<size_t>(rows_in_stage))) {
        ++n_turns;
    }
    std::vector<cell_move> rest;
    for (size_t i = n_turns; i < turns.size(); ++i) {
        rest.insert(rest.end(), turns[i].begin(), turns[i].end());
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
    for (size_t i = 0; i < n_turns; ++i) {
        copy(std::move(turns[i]), planes, planes);
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

    std::vector<cell_move> some;
    int64_t                aside = -1;  // the cell whose row was put aside
    const auto             flush = [&] {
        sort(some, is_lower);
        std::vector<cell_move> in, out;
        for (size_t i = 0; i < some.size(); ++i) {
            const auto place = static_cast<int64_t>(i);
            if (some[i].from != aside) {
                in.push_back({ some[i].from, place });
            }
            out.push_back({ some[i].from != aside ? place : put_aside, some[i].to });
        }
        copy(std::move(in), planes, stages);
        copy(std::move(out), stages, planes);
        some.clear();
    };
    const auto add = [&](const cell_move & move) {
        some.push_back(move);
        if (some.size() == static_cast<size_t>(rows_in_stage)) {
            flush();
        }
    };

    std::unordered_map<int64_t, cell_move> into;  // by the cell that is filled
    std::unordered_set<int64_t>            left;
    for (const cell_move & move : moves) {
        into.emplace(move.to, move);
        left.insert(move.from);
    }
    // The moves from `first` on, each into the cell that the one before it leaves; they are taken out of `into`.
    const auto chain_of = [&](const cell_move & first) {
        std::vector<cell_move> chain;
        for (auto at = into.find(first.to); at != into.end(); at = into.find(chain.back().from)) {
            chain.push_back(at->second);
            into.erase(at);
        }
        return chain;
    };
    for (const cell_move & move : moves) {
        if (left.count(move.to) == 0) {
            for (const cell_move & next : chain_of(move)) {
                add(next);
            }
        }
    }
    for (const cell_move & move : moves) {
        const std::vector<cell_move> ring = chain_of(move);
        if (some.size() + ring.size() > static_cast<size_t>(rows_in_stage)) {
            flush();
        }
        if (ring.size() > static_cast<size_t>(rows_in_stage)) {
            aside = ring.front().to;
            copy({ { aside, put_aside } }, planes, stages);
        }
        for (const cell_move & next : ring) {
            add(next);
        }
        if (aside >= 0) {
            flush();
            aside = -1;
        }
    }
    flush();
}
