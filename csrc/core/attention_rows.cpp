#include "core/attention_rows.h"

#include <algorithm>

namespace {

// How many rows of blocks take their cells at a time.
constexpr int64_t rows_per_step = 8192;

// Rows [first, last) of `spans`.
std::vector<row_span> part_of(const std::vector<row_span> & spans, int64_t first, int64_t last) {
    std::vector<row_span> part;
    for (row_span span : spans) {
        span.first = std::max(span.first, first);
        span.last  = std::min(span.last, last);
        if (span.first < span.last) {
            part.push_back(span);
        }
    }
    return part;
}

// Where the step ends that starts with row `first` of `spans`.
int64_t step_end(const std::vector<row_span> & spans, int64_t first) {
    int64_t end = first, room = rows_per_step;
    for (const row_span & span : part_of(spans, first, last_position)) {
        if (room > 0 && span.held == 0) {
            end = std::min(span.last, span.first + room);
            room -= end - span.first;
        } else if (room > 0) {
            end = span.last;  // is copied on the device, so fast that there is nothing to overlap
        }
    }
    return end;
}

}  // namespace

attention_rows::attention_rows(llama_memory_t memory, const std::vector<row_set> & sets, const row_layout & layout,
                               uint64_t hash, transfer & copies, bool defers)
    : row_memory(layout, hash, copies, sets[0].cache.size()), memory(memory), sets(sets), cache(sets[0].cache),
      planes(planes_of(layout, cache.size())), cells(cache, held), relocating(planes, held, copies),
      positions(llama_max_parallel_sequences()), defers(defers) {}

int64_t attention_rows::end_of(llama_seq_id seq) const {
    return seq == cut_seq ? cut_at : positions_of(seq).end_of(last_of(seq));
}

void attention_rows::add_image(llama_seq_id seq, int64_t columns, int64_t count) {
    int64_t n_there = 0;
    for (int64_t cell = 0; cell < cache.size(); ++cell) {
        n_there += cache.has(cell, seq, 0, INT32_MAX);
    }
    if (!layout.is_2d || columns <= 0 || count <= 0 || seq == cut_seq) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " has no image there");
    }
    positions[static_cast<size_t>(seq)].add_image(last_of(seq), columns, count);
    if (end_of(seq) != n_there) {
        throw std::runtime_error("sequence " + std::to_string(seq) + " has " + std::to_string(n_there) + " cells for " +
                                 std::to_string(end_of(seq)) + " rows");
    }
}

std::vector<cell_run> attention_rows::runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const {
    std::vector<cell_run> runs;
    const row_positions & positions  = positions_of(seq);
    const bool            has_images = positions.has_images();
    const auto            first      = static_cast<llama_pos>(positions.position(p0));
    const auto            end        = static_cast<llama_pos>(positions.position(p1 - 1) + 1);
    int64_t               found      = 0;
    for (int64_t cell = 0; cell < cache.size() && found < p1 - p0; ++cell) {
        const auto has = [&](const row_set & set) { return set.cache.has(cell, seq, first, end); };
        if (!std::all_of(sets.begin(), sets.end(), has)) {
            continue;  // not of all sets: from a file that some other program made
        }
        int64_t row = cache.position(cell);
        if (has_images) {
            row = positions.row_of(row, cache.extra(cell));
            if (row < p0 || row >= p1) {
                continue;  // of the same image
            }
        }
        ++found;
        append_run(runs, { cell, row, 1 });
    }
    if (found != p1 - p0) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " holds " + std::to_string(found) + " of the " +
                                    std::to_string(p1 - p0) + " rows " + range_text(p0, p1));
    }
    return runs;
}

void attention_rows::copy_out(const std::vector<cell_run> & runs, int64_t p0, int64_t p1, uint8_t * out) {
    each_region(planes, runs, p0, p1, p0, p1, [&](const copy_region & from) { copies.save(from, out); });
}

int64_t attention_rows::position_after(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const {
    return appended(positions_of(seq), spans).position(spans.empty() ? p0 : spans.back().last);
}

void attention_rows::load_checked(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) {
    row_positions next = appended(positions_of(seq), spans);
    if (seq != cut_seq) {
        settle();
    }
    check_free(n_needed(spans));
    changed();
    positions[static_cast<size_t>(seq)] = std::move(next);
    // Taking cells costs the host some time per row: in steps, so that one step is copied while the next takes its cells.
    try {
        // The first rows get the cells of those that were dropped, where the library would give them these.
        const int64_t               last      = spans.back().last;
        const std::vector<cell_run> taken     = take_over(seq, p0, last);
        const int64_t               first_new = taken.empty() ? p0 : taken.back().row + taken.back().count;
        // Those have theirs at once: a part of them would find no use for cells of the others that held rows free.
        if (!taken.empty()) {
            append(taken, part_of(spans, p0, first_new));
        }
        for (int64_t at = first_new, end; at < last; at = end) {
            end = step_end(spans, at);
            append(claim_cells(seq, at, end), part_of(spans, at, end));
        }
    } catch (...) {
        copies.finish();
        settle();
        remove(seq, position(seq, p0));  // also the image that p0 is inside of
        positions[static_cast<size_t>(seq)].truncate(positions_of(seq).end_of(last_of(seq)));
        fence();
        changed();
        throw;
    }
    llama_memory_seq_cp(memory, seq, seq, -1, -1);
    copies.load_end();
}

void attention_rows::truncate(llama_seq_id seq, int64_t n) {
    if (n >= end_of(seq)) {
        positions[static_cast<size_t>(seq)].truncate(n);  // whatever else has emptied it
        return;
    }
    if (positions_of(seq).is_inside(n)) {
        throw std::invalid_argument("row " + std::to_string(n) + " is inside an image");
    }
    if (seq != cut_seq) {
        settle();
    }
    cut_seq = seq;
    cut_at  = n;
    cut_pos = position(seq, n);
    positions[static_cast<size_t>(seq)].truncate(n);
    if (!defers) {
        settle();
    }
    fence();
    changed();
}

// A memory that derives something of its cells, such as pools of an indexer's keys, forgets it when the sequence is copied.
void attention_rows::remove(llama_seq_id seq, int64_t pos) {
    for (const row_set & set : sets) {
        llama_memory_seq_rm(set.cache.memory(), seq, static_cast<llama_pos>(pos), -1);
    }
    llama_memory_seq_cp(memory, seq, seq, -1, -1);
}

void attention_rows::settle() {
    if (cut_seq >= 0) {
        if (last_of(cut_seq) >= cut_pos) {  // else a caller has told the library already
            remove(cut_seq, cut_pos);
        }
        cut_seq = -1;
        changed();
    }
}

// Gives rows [p0, last) of `seq`, which were dropped but are not settled, to those that are loaded: as many as lie in
// the lowest vacant cells one after the other, which the library would choose, and are text before and after.
// The rest is settled. Returns where the rows from p0 on lie that need no other cell.
std::vector<cell_run> attention_rows::take_over(llama_seq_id seq, int64_t p0, int64_t last) {
    std::vector<cell_run> taken;
    if (cut_seq != seq) {
        return taken;
    }
    // One row of them is dropped at least: then the library looks for the next cells from its on.
    const int64_t shift = p0 - cut_pos;
    const int64_t end   = std::min({ last, last_of(seq) + shift, positions_of(seq).next_image(p0) });
    int64_t       next  = p0;
    for (int64_t cell = 0; cell < cache.size() && next < end; ++cell) {
        if (is_vacant(cell)) {
            if (cache.is_empty(cell) || cache.position(cell) + shift != next) {
                settle();
                return {};
            }
            if (layout.is_2d && cache.extra(cell).token < 0) {
                break;  // an image was there
            }
            append_run(taken, { cell, next++, 1 });
        }
    }
    cut_at  = next;
    cut_pos = next - shift;
    settle();
    return taken;
}

// Where the rows are when the rows of `spans` follow them.
row_positions attention_rows::appended(const row_positions & before, const std::vector<row_span> & spans) const {
    row_positions after = before;
    int64_t       row   = spans.empty() ? 0 : spans.front().first;
    for (const cell_extra & ext : layout.is_2d ? exts_of(spans) : std::vector<cell_extra>()) {
        if (!after.append(row++, ext)) {
            throw std::invalid_argument("row " + std::to_string(row - 1) + " of the block cannot follow the one before it");
        }
    }
    return after;
}

// Brings the rows of `spans` to their cells, `runs`, which have their positions: the library's other facts follow.
void attention_rows::append(const std::vector<cell_run> & runs, const std::vector<row_span> & spans) {
    const std::vector<cell_extra> exts = exts_of(spans);
    for (const cell_run & run : runs) {
        for (int64_t i = 0; i < run.count && layout.has_ext; ++i) {
            for (row_set & set : sets) {
                set.cache.set_extra(run.cell + i, exts[run.row + i - spans.front().first]);
            }
        }
    }
    if (!held.empty()) {
        relocate(moves_into(held_runs(spans), runs, cells));
    }
    if (std::any_of(spans.begin(), spans.end(), [](const row_span & span) { return span.held == 0; })) {
        copies.load_begin();
    }
    for (const row_span & span : spans) {
        if (span.held != 0) {
            continue;
        }
        const block_header header = read_header(span.data, span.size, rows_block, hash);
        const uint8_t * rows = span.data + sizeof(block_header) + (header.p1 - header.p0) * layout.ext_bytes();
        each_region(planes, runs, header.p0, header.p1, span.first, span.last,
                    [&](const copy_region & to) { copies.load(to, rows); });
    }
}

// Lets the library find cells for rows [p0, last) of `seq`, which ends at p0. Reading a state would do the same, but only
// for a whole sequence, and handing rows over from one to another takes longer than finding their cells.
std::vector<cell_run> attention_rows::claim_cells(llama_seq_id seq, int64_t p0, int64_t last) {
    std::vector<llama_pos> pos;
    for (int64_t row = p0; row < last; ++row) {
        pos.push_back(static_cast<llama_pos>(position(seq, row)));
    }
    const std::vector<int64_t> cells = cache.find(last - p0);
    std::vector<cell_run>      runs;
    for (const row_set & set : sets) {
        runs = take(set.cache, cells, seq, pos, p0);
    }
    return runs;
}

// -- rows that stay ----------------------------------------------------------------------------------------------------

held_rows::handle attention_rows::hold(llama_seq_id seq, int64_t p0, int64_t p1) {
    size(p0, p1);
    settle();
    const std::vector<cell_run> runs = runs_of(seq, p0, p1);
    std::vector<cell_extra>     exts(layout.has_ext ? static_cast<size_t>(p1 - p0) : 0);
    for (const cell_run & run : runs) {
        for (int64_t i = 0; i < run.count && layout.has_ext; ++i) {
            exts[run.row + i - p0] = cache.extra(run.cell + i);
        }
    }
    return held.add(p0, p1, runs, std::move(exts));
}

void attention_rows::count() const {
    if (!is_counted) {
        const int64_t size = cache.size();
        int64_t       only_held = 0, vacant = 0;  // in registers
        for (int64_t cell = 0; cell < size; ++cell) {
            if (is_vacant(cell)) {
                ++vacant;
                only_held += held.holds(cell);
            }
        }
        is_counted  = true;
        n_only_held = only_held;
        n_cut       = vacant - (size - cache.n_used());
    }
}

int64_t attention_rows::n_free() const {
    count();
    return cache.size() - cache.n_used() + n_cut - n_only_held;
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

void attention_rows::reserve(int64_t n, bool in_parts) {
    settle();
    if (held.empty() || n <= 0) {
        return;  // the library reports itself that cells are missing
    }
    check_free(n);
    // The library looks for empty cells from some hidden cell on, or from the first one on. If it takes them in
    // parts, it may start anew for each.
    std::vector<int64_t> next = cache.find(n);
    for (int64_t cell = 0; in_parts && n > 0 && cell < cache.size(); ++cell) {
        if (cache.is_empty(cell)) {
            --n;
            if (std::find(next.begin(), next.end(), cell) == next.end()) {
                next.push_back(cell);
            }
        }
    }
    if (std::any_of(next.begin(), next.end(), [&](int64_t cell) { return held.holds(cell); })) {
        check_free(static_cast<int64_t>(next.size()));
        relocate(moves_out_of(next, cells));
    }
}

// Where the rows of `spans` that are held lie.
std::vector<cell_run> attention_rows::held_runs(const std::vector<row_span> & spans) const {
    std::vector<cell_run> all;
    for (const row_span & span : spans) {
        if (span.held != 0) {
            const auto runs = held.runs_of(span.held, span.first, span.last);
            all.insert(all.end(), runs.begin(), runs.end());
        }
    }
    return all;
}

// Free cells that loading takes: for blocks, and for held rows that another sequence keeps in its own cells.
int64_t attention_rows::n_needed(const std::vector<row_span> & spans) const {
    int64_t n = spans.back().last - spans.front().first;
    for (const cell_run & run : held_runs(spans)) {
        for (int64_t cell = run.cell; cell < run.cell + run.count; ++cell) {
            n -= is_vacant(cell);
        }
    }
    return n;
}

// Computations and copies until now have the rows where they were.
void attention_rows::relocate(const std::vector<cell_move> & moves) {
    if (!moves.empty()) {
        fence();
        relocating.run(moves, cache.size());
    }
}
