// The part of attention_rows that relocates held rows on the device before their cells are taken.
#include "core/attention_rows.h"

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

// The moves of all these sources, in order, to these destinations: what lies together stays together.
std::vector<cell_move> paired(std::vector<int64_t> from, std::vector<int64_t> to) {
    sort(from);
    sort(to);
    std::vector<cell_move> moves;
    moves.reserve(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
        moves.push_back({ from[i], to[i] });
    }
    return moves;
}

bool is_lower(const cell_move & a, const cell_move & b) {
    return a.from < b.from;
}

// Calls `call(from, to, count)` for each stretch of moves that copy neighbours to neighbours.
template <typename F> void each_stretch(const std::vector<cell_move> & moves, const F & call) {
    for (size_t i = 0, n; i < moves.size(); i += n) {
        for (n = 1; i + n < moves.size() && moves[i + n].from == moves[i].from + static_cast<int64_t>(n) &&
                    moves[i + n].to == moves[i].to + static_cast<int64_t>(n);) {
            ++n;
        }
        call(moves[i].from, moves[i].to, n);
    }
}

}  // namespace

held_rows::handle attention_rows::hold(llama_seq_id seq, int64_t p0, int64_t p1) {
    size(p0, p1);
    settle();
    std::vector<cell_run>          runs = runs_of(seq, positions_of(seq), p0, p1);
    std::vector<llama_kv_cell_ext> exts = exts_in(runs, p0, p1);
    return held.add(p0, p1, std::move(runs), std::move(exts));
}

void attention_rows::release(held_rows::handle rows) {
    count();
    row_memory::release(rows);
}

int64_t attention_rows::n_own(held_rows::handle rows, int64_t p0, int64_t p1) const {
    int64_t n = 0;
    if (!held.has(rows)) {
        return n;
    }
    for (const cell_run & run : held.runs_of(rows, p0, p1)) {
        for (int64_t cell = run.cell; cell < run.cell + run.count; ++cell) {
            n += is_vacant(cell) && held.count(cell) == 1;
        }
    }
    return n;
}

// Whether no sequence has the cell, or just one that has dropped it.
bool attention_rows::is_vacant(int64_t at) const {
    const auto cell = static_cast<uint32_t>(at);
    return books.is_empty(cell) ||
           (cut_seq >= 0 && books.pos_get(cell) >= cut_pos && books.seq_get_all(cell) == cut_alone);
}

void attention_rows::count() const {
    if (!is_counted) {
        is_counted  = true;
        n_only_held = n_cut = 0;
        for (uint32_t cell = 0; cell < cells().size(); ++cell) {
            const bool vacant = is_vacant(cell);
            n_only_held += vacant && held.holds(cell);
            n_cut += vacant && !cells().is_empty(cell);
        }
    }
}

int64_t attention_rows::n_free() const {
    count();
    return static_cast<int64_t>(cells().size()) - cells().get_used() + n_cut - n_only_held;
}

int64_t attention_rows::n_held() const {
    count();
    return n_only_held;
}

void attention_rows::check_free(int64_t n) const {
    if (n > n_free()) {
        throw out_of_cells(std::to_string(n) + " cells are needed, " + std::to_string(n_free()) + " are free");
    }
}

// The cells that the library would take for n tokens: it looks for empty ones from some cell on, which it alone knows,
// or from the first one on. If it takes them in parts, it may begin anew for each.
std::vector<int64_t> attention_rows::next_cells(int64_t n, bool in_parts) const {
    const auto           found = cell_batch(0, std::vector<llama_pos>(static_cast<size_t>(n))).slots_in(cache);
    std::vector<int64_t> next;
    if (!found.empty()) {
        next.assign(found.idxs[0].begin(), found.idxs[0].end());
    }
    if (in_parts) {
        const size_t n_found = next.size();
        for (uint32_t cell = 0; cell < cells().size() && n > 0; ++cell) {
            if (cells().is_empty(cell)) {
                --n;
                if (std::find(next.begin(), next.begin() + n_found, cell) == next.begin() + n_found) {
                    next.push_back(cell);
                }
            }
        }
    }
    return next;
}

void attention_rows::reserve(int64_t n, bool in_parts) {
    settle();
    if (held.empty() || n <= 0) {
        return;  // the library says itself what it has no cells for
    }
    check_free(n);
    const std::vector<int64_t> next = next_cells(n, in_parts);
    std::vector<int64_t>       from;
    for (const int64_t cell : next) {
        if (held.holds(cell)) {
            from.push_back(cell);
        }
    }
    if (from.empty()) {
        return;
    }
    check_free(static_cast<int64_t>(next.size()));
    const auto        size     = static_cast<int64_t>(cells().size());
    const auto        is_empty = [&](int64_t cell) { return cells().is_empty(static_cast<uint32_t>(cell)); };
    std::vector<bool> is_next(cells().size());
    for (const int64_t cell : next) {
        is_next[cell] = true;
    }

    // What the evaluations after this one will take, as far as there are free cells above.
    const int64_t ahead_end = std::min(size, next.back() + 1 + cells_ahead);
    std::vector<int64_t> ahead, to;
    for (int64_t cell = next.back() + 1; cell < ahead_end; ++cell) {
        if (held.holds(cell) && is_empty(cell) && !is_next[cell]) {
            ahead.push_back(cell);
        }
    }
    for (int64_t cell = size - 1; cell >= 0 && to.size() < from.size() + ahead.size(); --cell) {
        if (cell < ahead_end && to.size() >= from.size()) {
            break;
        }
        if (is_empty(cell) && !held.holds(cell) && !is_next[cell]) {
            to.push_back(cell);
        }
    }
    ahead.resize(std::min(ahead.size(), to.size() - from.size()));
    from.insert(from.end(), ahead.begin(), ahead.end());
    relocate(paired(std::move(from), std::move(to)));
}

// Free cells that loading takes: those of blocks, and of held rows that another sequence keeps in its own cells.
int64_t attention_rows::n_needed(const std::vector<row_span> & spans) const {
    int64_t n = 0;
    for (const row_span & span : spans) {
        n += span.last - span.first;
        if (span.held != 0) {
            for (const cell_run & run : held.runs_of(span.held, span.first, span.last)) {
                for (int64_t cell = run.cell; cell < run.cell + run.count; ++cell) {
                    n -= is_vacant(cell);
                }
            }
        }
    }
    return n;
}

// Adds to the free cells `to` such that `moves` leave, one for each of `from`, what else is held in the cells `filled`.
void attention_rows::add_left_cells(std::vector<int64_t> & to, const std::vector<int64_t> & from,
                                    const std::vector<cell_move> & moves, const std::vector<int64_t> & filled) const {
    const auto           is_empty = [&](int64_t cell) { return cells().is_empty(static_cast<uint32_t>(cell)); };
    std::vector<int64_t> filled_from(cells().size(), -1);
    for (const cell_move & move : moves) {
        filled_from[move.to] = move.from;
    }
    std::vector<int64_t> few;
    if (to.size() < static_cast<size_t>(rows_in_stage)) {
        few.swap(to);  // so few would take too many turns: rows change places instead, as far as they can
    }
    // Each of the others goes to a cell that is left when one before it has gone, so that no row waits for itself.
    const auto left_for = [&](int64_t cell) {
        while (filled_from[cell] >= 0 && filled_from[cell] != cell) {
            cell = filled_from[cell];
        }
        return cell;
    };
    const auto add_left = [&](int64_t cell) {
        const int64_t last = left_for(cell);
        if (to.size() < from.size() && last != cell && is_empty(last)) {
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

// Brings what is held to the cells that were taken for it, `runs`, and what else is held there to other cells.
void attention_rows::fill(const std::vector<cell_run> & runs, const std::vector<row_span> & spans) {
    if (held.empty()) {
        return;
    }
    const auto           is_empty = [&](int64_t cell) { return cells().is_empty(static_cast<uint32_t>(cell)); };
    const int64_t        p0 = spans.front().first;
    std::vector<int64_t> cell_of(static_cast<size_t>(spans.back().last - p0));
    for (const cell_run & run : runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            cell_of[run.row + i - p0] = run.cell + i;
        }
    }
    std::vector<cell_move> moves;
    moves.reserve(2 * cell_of.size());
    std::vector<bool> leaves(cells().size());
    for (const row_span & span : spans) {
        if (span.held != 0) {
            for (const cell_run & run : held.runs_of(span.held, span.first, span.last)) {
                for (int64_t i = 0; i < run.count; ++i) {
                    moves.push_back({ run.cell + i, cell_of[run.row + i - p0] });
                    leaves[run.cell + i] = true;
                }
            }
        }
    }
    std::vector<int64_t> from, to;
    for (const int64_t cell : cell_of) {
        if (held.holds(cell) && !leaves[cell]) {
            from.push_back(cell);
        }
    }
    sort(from);
    to.reserve(from.size());
    for (auto cell = static_cast<int64_t>(cells().size()) - 1; cell >= 0 && to.size() < from.size(); --cell) {
        if (is_empty(cell) && !held.holds(cell)) {
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
    relocate(moves);
}

// Each row goes where it shall be: no two go to one cell, and none to one that another row needs.
void attention_rows::relocate(const std::vector<cell_move> & all) {
    std::vector<cell_move> moves;
    moves.reserve(all.size());
    std::vector<bool> leaves(cells().size());
    for (const cell_move & move : all) {
        if (move.from != move.to) {
            moves.push_back(move);
            leaves[move.from] = true;
        }
    }
    if (moves.empty()) {
        return;
    }
    // First those whose cells are free, then those whose cells these have left.
    std::vector<cell_move> ready;
    ready.reserve(moves.size());
    std::vector<int64_t> waits(cells().size(), -1);  // for each cell, which move waits until it is left
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
    fence();
    copies.move_begin();
    for (size_t i = 0; i < n_turns; ++i) {
        copy_cells(std::move(turns[i]));
    }
    if (!rest.empty()) {
        exchange(rest);
    }
    held.moved(moves);
}

// `moves` are sorted or not; no cell is both left and filled.
void attention_rows::copy_cells(std::vector<cell_move> moves) {
    sort(moves, is_lower);
    each_stretch(moves, [&](int64_t from, int64_t to, size_t n) {
        for (plane & plane : planes) {
            copies.move({ &plane.tensor, from * plane.row, n * plane.row, plane.count, plane.stride },
                        { &plane.tensor, to * plane.row, n * plane.row, plane.count, plane.stride });
        }
    });
}

void attention_rows::open_stages() {
    if (!stages.empty()) {
        return;
    }
    std::vector<tensor_buffer> opened;
    for (const plane & plane : planes) {
        opened.push_back(allocate_zeros(ggml_backend_buffer_get_type(plane.tensor.buffer),
                                        plane.count * plane.row * (rows_in_stage + 1)));
    }
    stages = std::move(opened);
}

// Rows whose cells are left by others of them: some at a time, all of these read before the first is written. The rows
// of a ring go one after the other, each into the cell that the last one has left; where that takes several times, what
// lies in the first of these cells is put aside.
void attention_rows::exchange(const std::vector<cell_move> & moves) {
    constexpr int64_t put_aside = rows_in_stage;  // a place of the stage

    open_stages();
    const auto via_stage = [&](int64_t cell, int64_t place, size_t n, bool back) {
        for (size_t i = 0; i < planes.size(); ++i) {
            plane &           plane = planes[i];
            const copy_region on_device{ &plane.tensor, cell * plane.row, n * plane.row, plane.count, plane.stride };
            const copy_region staged{ &stages[i].bytes, place * plane.row, n * plane.row, plane.count,
                                      (rows_in_stage + 1) * plane.row };
            back ? copies.move(staged, on_device) : copies.move(on_device, staged);
        }
    };
    std::vector<cell_move> some;
    int64_t                aside = -1;  // the cell whose row was put aside
    const auto             flush = [&] {
        std::sort(some.begin(), some.end(), is_lower);
        std::vector<cell_move> in, out;
        for (size_t i = 0; i < some.size(); ++i) {
            const auto place = static_cast<int64_t>(i);
            if (some[i].from != aside) {
                in.push_back({ some[i].from, place });
            }
            out.push_back({ some[i].from != aside ? place : put_aside, some[i].to });
        }
        std::sort(out.begin(), out.end(), is_lower);
        each_stretch(in, [&](int64_t cell, int64_t place, size_t n) { via_stage(cell, place, n, false); });
        each_stretch(out, [&](int64_t place, int64_t cell, size_t n) { via_stage(cell, place, n, true); });
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
            via_stage(aside, put_aside, 1, false);
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
