// The functions of csrc/device/relocation_plan.h on arrays, for test_relocation_plan.py: a library
// of its own, which shows that plans need neither llama.cpp nor a device.
#include "device/relocation_plan.h"

#include <algorithm>

namespace {

class listed_cells final : public cell_map {
public:
    listed_cells(int64_t n_cells, const uint8_t * empty, const uint8_t * held)
        : n_cells(n_cells), empty(empty), held(held) {}

    int64_t size() const override { return n_cells; }
    bool    is_empty(int64_t cell) const override { return empty[cell] != 0; }
    bool    is_held(int64_t cell) const override { return held[cell] != 0; }

private:
    int64_t         n_cells;
    const uint8_t * empty;
    const uint8_t * held;
};

int64_t write(const std::vector<cell_move> & moves, cell_move * out) {
    std::copy(moves.begin(), moves.end(), out);
    return static_cast<int64_t>(moves.size());
}

struct numbered_run {
    int64_t step, kind, from, to, count;
};

}  // namespace

// The results return how many entries of `out` are set; cells have at most one move each.
extern "C" {

int64_t out_of(int64_t n_cells, const uint8_t * empty, const uint8_t * held, int64_t n_next,
               const int64_t * next, cell_move * out) {
    const listed_cells cells(n_cells, empty, held);
    return write(moves_out_of({ next, next + n_next }, cells), out);
}

// -1 if there are too few cells.
int64_t into(int64_t n_cells, const uint8_t * empty, const uint8_t * held, int64_t n_from,
             const cell_run * from, int64_t n_to, const cell_run * to, cell_move * out) {
    const listed_cells cells(n_cells, empty, held);
    try {
        return write(moves_into({ from, from + n_from }, { to, to + n_to }, cells), out);
    } catch (const out_of_cells &) {
        return -1;
    }
}

int64_t plan(int64_t n_moves, const cell_move * moves, int64_t n_cells, numbered_run * out) {
    const copy_plan planned = plan_copies({ moves, moves + n_moves }, n_cells);
    int64_t         n_runs  = 0;
    int64_t         number  = 0;
    for (const copy_step & step : planned.steps) {
        for (const copy_run & run : step.runs) {
            out[n_runs] = { number, static_cast<int64_t>(step.kind), run.from, run.to, run.count };
            ++n_runs;
        }
        ++number;
    }
    return n_runs;
}

int64_t scratch_rows() {
    return n_scratch_rows;
}
}
