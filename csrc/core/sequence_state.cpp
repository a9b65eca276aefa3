#include "core/sequence_state.h"

#include "core/cells.h"
#include "device/tensor_buffer.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace {

class recurrent_state : public sequence_state {
public:
    recurrent_state(llama_memory_t memory, const memory_layout & layout, transfer & copies, size_t n_marks)
        : memory(memory), steps(layout.recurrent), parts(layout.parts), pieces(regions_of(steps, parts)), copies(copies) {
        for (size_t i = 0; i < pieces.size() && n_marks > 0; ++i) {
            kept.push_back(allocate_zeros(ggml_backend_buffer_get_type(buffer_of(pieces[i].tensor)), pieces[i].total() * n_marks));
        }
    }

    int64_t position(llama_seq_id seq) const override { return llama_memory_seq_pos_max(memory, seq) + 1; }

    size_t size(llama_seq_id) const override {
        return std::accumulate(pieces.begin(), pieces.end(), size_t(0), [](size_t n, const copy_region & r) { return std::max(n, r.end()); });
    }

    void save(llama_seq_id seq, uint8_t * out, size_t) override {
        copies.save_staged(known(library::written(memory, seq)), out);
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t) override {
        copies.load_begin();
        for (const copy_region & to : read(seq, n)) {
            copies.load(to, data);
        }
    }

    void clear(llama_seq_id seq) override { llama_memory_seq_rm(memory, seq, -1, -1); }

    bool has_marks() const override { return !kept.empty(); }

    void mark(llama_seq_id seq) override {
        size_t i = 0;
        copies.move_begin();
        for (const copy_region & from : known(library::written(memory, seq))) {
            copies.move(from, kept_at(seq, i++));
        }
    }

    void reset(llama_seq_id seq, int64_t n) override {
        size_t i = 0;
        copies.move_begin();
        for (const copy_region & to : read(seq, n)) {
            copies.move(kept_at(seq, i++), to);
        }
    }

private:
    // Where a state lies that is written or read in `these` steps, in pieces like any other's.
    std::vector<copy_region> known(const std::vector<io_step> & these) const {
        std::vector<copy_region> regions = regions_of(these, parts);
        const auto               is_same = [](const copy_region & a, const copy_region & b) { return a.size == b.size; };
        if (!std::equal(regions.begin(), regions.end(), pieces.begin(), pieces.end(), is_same)) {
            throw std::runtime_error("llama.cpp wrote a recurrent state in another way than before");
        }
        return regions;
    }

    // Where piece i of the marked state of `seq` lies.
    copy_region kept_at(llama_seq_id seq, size_t i) {
        const copy_region & piece = pieces[i];
        return { &kept[i].bytes, static_cast<size_t>(seq) * piece.total(), piece.size, piece.count, piece.size };
    }

    // Lets the library give `seq` a cell that stands at n. Returns where its state goes.
    std::vector<copy_region> read(llama_seq_id seq, int64_t n) {
        std::vector<uint8_t> plain;
        for (const io_step & step : steps) {
            plain.insert(plain.end(), step.bytes.begin(), step.bytes.end());
        }
        // After the cell count comes the position of the cell's last token.
        const auto last = static_cast<llama_pos>(n - 1);
        std::memcpy(plain.data() + steps[0].size, &last, sizeof(last));
        return known(library::read(memory, seq, std::move(plain)));
    }

    llama_memory_t           memory;
    std::vector<io_step>     steps;
    tensor_parts             parts;
    std::vector<copy_region> pieces;
    transfer &               copies;

    std::vector<tensor_buffer> kept;  // of each piece, all sequences' one after the other
};

class opaque_state : public sequence_state {
public:
    explicit opaque_state(llama_context * ctx) : ctx(ctx) {}

    int64_t position(llama_seq_id seq) const override {
        return llama_memory_seq_pos_max(llama_get_memory(ctx), seq) + 1;
    }

    size_t size(llama_seq_id seq) const override { return llama_state_seq_get_size(ctx, seq); }

    void save(llama_seq_id seq, uint8_t * out, size_t size) override {
        llama_synchronize(ctx);
        if (llama_state_seq_get_data(ctx, out, size, seq) == 0) {
            throw std::runtime_error("llama.cpp could not write the state of the sequence");
        }
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) override {
        llama_synchronize(ctx);
        if (llama_state_seq_set_data(ctx, data, size, seq) == 0 || position(seq) != n) {
            clear(seq);
            throw std::invalid_argument("llama.cpp refused the state, or read one of another position");
        }
    }

    void clear(llama_seq_id seq) override { llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1); }

private:
    llama_context * ctx;
};

}  // namespace

std::unique_ptr<sequence_state> state_of(llama_context * ctx, const memory_parts & parts, const memory_layout & layout,
                                         transfer & copies, size_t n_marks) {
    if (parts.kind == memory_kind::opaque) {
        return std::make_unique<opaque_state>(ctx);
    }
    if (parts.recurrent == nullptr) {
        return nullptr;
    }
    return std::make_unique<recurrent_state>(parts.recurrent, layout, copies, n_marks);
}

window_rows::window_rows(llama_context * ctx, library::cache cache, const row_layout & rows, transfer & copies)
    : ctx(ctx), cache(cache), planes(planes_of(rows, cache.size())), row_bytes(rows.row_bytes() - rows.ext_bytes()),
      copies(copies) {}

int64_t window_rows::first_seen(int64_t n) const {
    int64_t first = std::max(n - 1, int64_t(0));
    while (first > 0 && library::sees(ctx, n, first - 1)) {
        --first;
    }
    return first;
}

void window_rows::save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    const auto runs = p0 < 0 || p1 <= p0 || p1 > position(seq) ? std::vector<cell_run>() : runs_of(seq, p0, p1);
    if (runs.empty() || size != static_cast<size_t>(p1 - p0) * row_bytes) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " lacks rows of its window " + range_text(p0, p1) +
                                    ", or these do not have " + std::to_string(size) + " bytes");
    }
    copies.save_begin();
    each_region(planes, runs, p0, p1, p0, p1, [&](const copy_region & from) { copies.save(from, out); });
    copies.load_end();  // the next evaluation may take these cells
}

void window_rows::load(llama_seq_id seq, int64_t n, const std::vector<row_span> & spans) {
    const int64_t first = first_seen(n);
    int64_t       end   = first;
    for (const row_span & span : spans) {
        end = span.first == end && span.last > end && span.last - end <= n_rows(span) ? span.last : INT64_MAX;
    }
    if (end != n) {
        throw std::invalid_argument("these blocks do not have the rows " + range_text(first, n) + " of a window");
    }
    clear(seq);
    const bool             is_alone = cache.n_used() == 0;
    const int64_t          begin    = is_alone ? std::max(n - cache.size(), int64_t(0)) : first;
    std::vector<llama_pos> pos(static_cast<size_t>(n - begin));
    std::iota(pos.begin(), pos.end(), static_cast<llama_pos>(begin));
    std::vector<int64_t> cells = is_alone ? std::vector<int64_t>() : cache.find(n - begin);
    for (int64_t each = begin; is_alone && each < n; ++each) {
        cells.push_back(each % cache.size());
    }
    const auto runs = take(cache, cells, seq, pos, begin);
    was_shared      = was_shared || !is_alone;
    copies.load_begin();
    for (const row_span & span : spans) {
        each_region(planes, runs, span.last - n_rows(span), span.last, span.first, span.last,
                    [&](const copy_region & to) { copies.load(to, span.data); });
    }
}

void window_rows::clear(llama_seq_id seq) {
    llama_memory_seq_rm(cache.memory(), seq, -1, -1);
    if (cache.n_used() == 0) {
        llama_memory_clear(cache.memory(), false);  // the next row starts at the first cell
    }
}

bool window_rows::cut(llama_seq_id seq, int64_t n) {
    const int64_t end = position(seq);
    if (n <= 0 || n > end || llama_memory_seq_pos_min(cache.memory(), seq) > first_seen(n)) {
        return false;
    }
    if (n < end && is_ring(seq, n)) {
        return_to_ring(seq, n);
    } else {
        llama_memory_seq_rm(cache.memory(), seq, static_cast<llama_pos>(n), -1);
    }
    return true;
}

// Whether `seq` has the cells to itself, and its rows from n - 1 on lie where a cold run has them.
bool window_rows::is_ring(llama_seq_id seq, int64_t n) const {
    const int64_t end   = position(seq);
    const int64_t first = std::max(end - cache.size(), int64_t(0));
    if (llama_memory_seq_pos_min(cache.memory(), seq) != first || cache.n_used() != end - first) {
        return false;
    }
    for (int64_t row = n - 1; row < end; ++row) {
        if (!cache.has(row % cache.size(), seq, static_cast<llama_pos>(row), static_cast<llama_pos>(row + 1))) {
            return false;
        }
    }
    return true;
}

// Drops the rows of `seq`, which is in a ring, from n on. The library would start its search for the next cell at the
// lowest one that is free, which is another one where the dropped rows go round the end of the ring. So they leave their
// cells to the rows that were there before, as in a cold run: nothing attends to those. Row n - 1 takes its cell last,
// and the library goes on after it.
void window_rows::return_to_ring(llama_seq_id seq, int64_t n) {
    const int64_t          end  = position(seq);
    const int64_t          size = cache.size();
    const int64_t          last = (n - 1) % size;
    const cell_extra       extra = cache.extra(last);
    std::vector<int64_t>   cells;
    std::vector<llama_pos> pos;
    for (int64_t row = std::max(n, size); row < end; ++row) {
        cells.push_back(row % size);
        pos.push_back(static_cast<llama_pos>(row - size));
    }
    cells.push_back(last);
    pos.push_back(static_cast<llama_pos>(n - 1));
    llama_memory_seq_rm(cache.memory(), seq, static_cast<llama_pos>(n - 1), -1);
    cache.take(cells, seq, pos);
    cache.set_extra(last, extra);
}

void window_rows::settle() {
    llama_seq_id last   = -1;
    size_t       n_here = 0;
    for (llama_seq_id seq = 0; seq < static_cast<llama_seq_id>(llama_n_seq_max(ctx)); ++seq) {
        if (position(seq) > 0) {
            last = seq;
            ++n_here;
        }
    }
    const int64_t n     = n_here == 1 && was_shared ? position(last) : 0;
    const int64_t first = first_seen(n);
    if (n > 0 && !runs_of(last, first, n).empty()) {
        std::vector<uint8_t> rows(size(n));
        save(last, first, n, rows.data(), rows.size());
        copies.finish();
        load(last, n, { { rows.data(), rows.size(), first, n } });
        copies.load_end();
        copies.finish();
    }
    was_shared = n_here > 1;
}

// Where rows [p0, p1) of `seq` lie; none unless all are there.
std::vector<cell_run> window_rows::runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const {
    std::vector<cell_run> runs;
    int64_t               found = 0;
    for (int64_t cell = 0; cell < cache.size(); ++cell) {
        if (cache.has(cell, seq, static_cast<llama_pos>(p0), static_cast<llama_pos>(p1))) {
            append_run(runs, { cell, cache.position(cell), 1 });
            ++found;
        }
    }
    return found == p1 - p0 ? runs : std::vector<cell_run>();
}
