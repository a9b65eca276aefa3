#include "device/relocation_plan.h"

#include <algorithm>
#include <utility>

namespace {

// How many cells above are vacated for later evaluations at the same time.
constexpr int64_t n_cells_ahead = 4096;

// So many turns are made however small they are.
constexpr size_t n_small_turns = 4;

// Rows of a batch, and of a turn that is not small.
constexpr size_t n_batch = n_scratch_rows;

constexpr int64_t nowhere = -1;

using cell_list = std::vector<int64_t>;
using move_list = std::vector<cell_move>;

// Returns for each cell the one whose row a move brings there, or nowhere.
cell_list sources_of(const move_list & moves, int64_t n_cells) {
    cell_list sources(n_cells, nowhere);
    for (const cell_move & move : moves) {
        sources[move.to] = move.from;
    }
    return sources;
}

// Returns for each cell whether a move leaves it.
std::vector<bool> left_by(const move_list & moves, int64_t n_cells) {
    std::vector<bool> is_left(n_cells);
    for (const cell_move & move : moves) {
        is_left[move.from] = true;
    }
    return is_left;
}

// -- which row goes where

// Appends cells of [first, end) that are `usable`, the highest first, until `found` has n.
template <typename F>
void append_highest(cell_list & found, size_t n, int64_t first, int64_t end, const F & usable) {
    for (int64_t cell = end - 1; cell >= first && found.size() < n; --cell) {
        if (usable(cell)) {
            found.push_back(cell);
        }
    }
}

// Appends a move from the lowest cell of `from` to the first of `to`, and so on: where `to`
// ascends, rows that lie together stay together.
void append_moves(move_list & moves, cell_list from, const cell_list & to) {
    std::sort(from.begin(), from.end());
    for (size_t i = 0; i < from.size(); ++i) {
        moves.push_back({ from[i], to[i] });
    }
}

// Returns the cell of each row, in the order of the rows.
cell_list cells_of(const std::vector<cell_run> & runs) {
    cell_list cells;
    for (const cell_run & run : runs) {
        for (int64_t i = 0; i < run.count; ++i) {
            cells.push_back(run.cell + i);
        }
    }
    return cells;
}

// Returns the last cells of the chains that start in `taken` cells, in their order: cells that are
// left and not filled again. Each is mostly given to the row that its chain displaces.
cell_list chain_ends(const cell_list & taken, const move_list & moves, const cell_map & cells) {
    const cell_list         sources = sources_of(moves, cells.size());
    const std::vector<bool> is_left = left_by(moves, cells.size());
    cell_list               ends;
    for (const int64_t first : taken) {
        if (is_left[first]) {
            continue;  // not the first cell of its chain
        }
        int64_t end = first;
        while (sources[end] != nowhere) {
            end = sources[end];
        }
        if (end != first && cells.is_empty(end)) {
            ends.push_back(end);
        }
    }
    return ends;
}

// Returns cells for n displaced rows: free ones and, if they are too few, cells that `moves` leave.
cell_list cells_for(size_t n, const cell_list & taken, const move_list & moves,
                    const cell_map & cells) {
    cell_list free;
    append_highest(free, n, 0, cells.size(), [&](int64_t cell) { return cells.is_free(cell); });
    std::reverse(free.begin(), free.end());
    if (free.size() == n) {
        return free;
    }
    // With only a few free cells there are many small turns. Exchanges are faster: rows that
    // displace each other change places, and free cells get the rows that remain.
    const cell_list ends       = chain_ends(taken, moves, cells);
    const bool      has_few    = free.size() < n_batch;
    cell_list       chosen     = has_few ? ends : free;
    const cell_list additional = has_few ? free : ends;
    chosen.insert(chosen.end(), additional.begin(), additional.end());
    if (chosen.size() < n) {
        throw out_of_cells("there are too few cells for the held rows");
    }
    chosen.resize(n);
    return chosen;
}

// -- in which order

// Moves of which none waits for another of its turn, and those that no turn has.
struct turn_list {
    std::vector<move_list> turns;
    move_list              rest;
};

// A chain or a ring in the order of its moves: each fills the cell that the one before it has left.
struct move_chain {
    move_list moves;
    bool      is_ring;
};

bool is_lower(const cell_move & a, const cell_move & b) {
    return a.from < b.from;
}

// Sorts by the cells that are left; most lists are sorted already.
void sort(move_list & moves) {
    if (!std::is_sorted(moves.begin(), moves.end(), is_lower)) {
        std::sort(moves.begin(), moves.end(), is_lower);
    }
}

// Joins moves of neighbours to neighbours.
std::vector<copy_run> runs_of(move_list moves) {
    sort(moves);
    std::vector<copy_run> runs;
    for (const auto [from, to] : moves) {
        const bool continues = !runs.empty() && runs.back().from + runs.back().count == from &&
                               runs.back().to + runs.back().count == to;
        if (continues) {
            ++runs.back().count;
        } else {
            runs.push_back({ from, to, 1 });
        }
    }
    return runs;
}

turn_list divide_into_turns(const move_list & moves, int64_t n_cells) {
    const std::vector<bool> is_left = left_by(moves, n_cells);
    cell_list               waiting(n_cells, nowhere);  // the move that waits until a cell is left
    move_list               turn;
    for (size_t i = 0; i < moves.size(); ++i) {
        if (is_left[moves[i].to]) {
            waiting[moves[i].to] = static_cast<int64_t>(i);
        } else {
            turn.push_back(moves[i]);
        }
    }
    turn_list divided;
    while (!turn.empty()) {
        move_list next;
        for (const cell_move & move : turn) {
            const int64_t i = std::exchange(waiting[move.from], nowhere);
            if (i != nowhere) {
                next.push_back(moves[i]);
            }
        }
        divided.turns.push_back(std::move(turn));
        turn = std::move(next);
        if (divided.turns.size() >= n_small_turns && turn.size() < n_batch) {
            divided.rest = std::move(turn);
            break;
        }
    }
    for (const int64_t i : waiting) {
        if (i != nowhere) {
            divided.rest.push_back(moves[i]);
        }
    }
    return divided;
}

// Returns all chains, then all rings.
std::vector<move_chain> chains_of(const move_list & moves, int64_t n_cells) {
    cell_list               sources = sources_of(moves, n_cells);
    const std::vector<bool> is_left = left_by(moves, n_cells);
    std::vector<move_chain> chains;
    const auto              append = [&](int64_t to, bool is_ring) {
        move_chain chain{ {}, is_ring };
        while (sources[to] != nowhere) {
            const int64_t from = std::exchange(sources[to], nowhere);
            chain.moves.push_back({ from, to });
            to = from;
        }
        chains.push_back(std::move(chain));
    };
    for (const cell_move & move : moves) {
        if (!is_left[move.to]) {
            append(move.to, false);
        }
    }
    for (const cell_move & move : moves) {
        if (sources[move.to] != nowhere) {  // no chain has it
            append(move.to, true);
        }
    }
    return chains;
}

// Appends the steps of exchanges: rows pass through scratch memory in batches.
class exchange_steps {
public:
    explicit exchange_steps(std::vector<copy_step> & steps) : steps(steps) {}

    void append(const move_chain & chain) {
        if (batch.size() + chain.moves.size() > n_batch) {
            finish_batch();
        }
        if (chain.is_ring && chain.moves.size() > n_batch) {
            append_long_ring(chain.moves);
        } else {
            append_moves(chain.moves);
        }
    }

    void finish_batch() {
        if (batch.empty()) {
            return;
        }
        sort(batch);
        move_list reads;
        move_list writes;
        for (size_t i = 0; i < batch.size(); ++i) {
            const auto row = static_cast<int64_t>(i);  // of scratch memory
            reads.push_back({ batch[i].from, row });
            writes.push_back({ row, batch[i].to });
        }
        steps.push_back({ copy_kind::cells_to_scratch, runs_of(reads) });
        steps.push_back({ copy_kind::scratch_to_cells, runs_of(writes) });
        batch.clear();
    }

private:
    void append_moves(const move_list & moves) {
        for (const cell_move & move : moves) {
            batch.push_back(move);
            if (batch.size() == n_batch) {
                finish_batch();
            }
        }
    }

    // The last row lies in the cell that the first move fills: set aside, it leaves a chain.
    void append_long_ring(move_list moves) {
        const cell_move last = moves.back();
        moves.pop_back();
        steps.push_back({ copy_kind::cells_to_scratch, { { last.from, n_scratch_rows, 1 } } });
        append_moves(moves);
        finish_batch();
        steps.push_back({ copy_kind::scratch_to_cells, { { n_scratch_rows, last.to, 1 } } });
    }

    std::vector<copy_step> & steps;
    move_list                batch;
};

}  // namespace

std::vector<cell_move> moves_out_of(const cell_list & next, const cell_map & cells) {
    std::vector<bool> is_next(cells.size());
    cell_list         from;
    for (const int64_t cell : next) {
        is_next[cell] = true;
        if (cells.is_held(cell)) {
            from.push_back(cell);
        }
    }
    const size_t  n_needed    = from.size();
    const int64_t ahead_first = next.back() + 1;
    const int64_t ahead_end   = std::min(cells.size(), ahead_first + n_cells_ahead);
    for (int64_t cell = ahead_first; cell < ahead_end; ++cell) {
        if (cells.is_held(cell) && cells.is_empty(cell) && !is_next[cell]) {
            from.push_back(cell);
        }
    }

    const auto usable = [&](int64_t cell) { return cells.is_free(cell) && !is_next[cell]; };
    cell_list  to;
    append_highest(to, from.size(), ahead_end, cells.size(), usable);
    append_highest(to, n_needed, 0, ahead_end, usable);
    from.resize(to.size());  // rows ahead stay where cells are missing
    std::reverse(to.begin(), to.end());
    move_list moves;
    append_moves(moves, from, to);
    return moves;
}

std::vector<cell_move> moves_into(const std::vector<cell_run> & from,
                                  const std::vector<cell_run> & to, const cell_map & cells) {
    const cell_list   taken = cells_of(to);
    const int64_t     p0    = to.front().row;
    std::vector<bool> is_loaded(cells.size());  // whether the row of a cell is one of those
    move_list         moves;
    for (const cell_run & run : from) {
        for (int64_t i = 0; i < run.count; ++i) {
            const cell_move move{ run.cell + i, taken[run.row + i - p0] };
            is_loaded[move.from] = true;
            if (move.from != move.to) {
                moves.push_back(move);
            }
        }
    }
    cell_list displaced;
    for (const int64_t cell : taken) {
        if (cells.is_held(cell) && !is_loaded[cell]) {
            displaced.push_back(cell);
        }
    }
    append_moves(moves, displaced, cells_for(displaced.size(), taken, moves, cells));
    return moves;
}

copy_plan plan_copies(const std::vector<cell_move> & moves, int64_t n_cells) {
    copy_plan       plan;
    const turn_list divided = divide_into_turns(moves, n_cells);
    for (const move_list & turn : divided.turns) {
        plan.steps.push_back({ copy_kind::cells_to_cells, runs_of(turn) });
    }
    if (divided.rest.empty()) {
        return plan;
    }
    plan.needs_scratch = true;
    exchange_steps exchanges(plan.steps);
    for (const move_chain & chain : chains_of(divided.rest, n_cells)) {
        exchanges.append(chain);
    }
    exchanges.finish_batch();
    return plan;
}
