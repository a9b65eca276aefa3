#include "core/sequence_state.h"

#include "core/cells.h"
#include "device/tensor_buffer.h"

#include <cstring>
#include <numeric>

namespace {

class recurrent_state : public sequence_state {
public:
    recurrent_state(llama_memory_t memory, const recurrent_layout & layout, transfer & copies, size_t n_marks)
        : memory(memory), layout(layout), pieces(regions_of(layout.steps)), copies(copies) {
        for (size_t i = 0; i < pieces.size() && n_marks > 0; ++i) {
            kept.push_back(allocate_zeros(ggml_backend_buffer_get_type(buffer_of(pieces[i].tensor)), pieces[i].size * n_marks));
        }
    }

    int64_t position(llama_seq_id seq) const override { return llama_memory_seq_pos_max(memory, seq) + 1; }

    size_t size(llama_seq_id) const override { return layout.n_bytes; }

    void save(llama_seq_id seq, uint8_t * out, size_t) override {
        copies.save_staged(written(seq), out);
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t) override {
        copies.load_begin();
        for (const copy_region & to : read(seq, n)) {
            copies.load(to, data);
            data += to.size;
        }
    }

    void clear(llama_seq_id seq) override { llama_memory_seq_rm(memory, seq, -1, -1); }

    bool has_marks() const override { return !kept.empty(); }

    void mark(llama_seq_id seq) override {
        size_t i = 0;
        copies.move_begin();
        for (const copy_region & from : written(seq)) {
            copies.move(from, kept_at(seq, i++, from.size));
        }
    }

    void reset(llama_seq_id seq, int64_t n) override {
        size_t i = 0;
        copies.move_begin();
        for (const copy_region & to : read(seq, n)) {
            copies.move(kept_at(seq, i++, to.size), to);
        }
    }

private:
    // Where a state lies of which `steps` are written or read.
    std::vector<copy_region> tensors_of(const std::vector<io_step> & steps) const {
        std::vector<copy_region> regions = regions_of(steps);
        size_t                   n_bytes = 0;
        for (const copy_region & region : regions) {
            n_bytes += region.size;
        }
        if (n_bytes != layout.n_bytes) {
            throw std::runtime_error("llama.cpp wrote another amount of recurrent state than before");
        }
        return regions;
    }

    // Where the state of `seq` lies now.
    std::vector<copy_region> written(llama_seq_id seq) const { return tensors_of(library::written(memory, seq)); }

    // Where piece i of the marked state of `seq` lies.
    copy_region kept_at(llama_seq_id seq, size_t i, size_t size) {
        if (i >= kept.size() || size != pieces[i].size) {
            throw std::runtime_error("llama.cpp wrote a state in another way than before");
        }
        return { &kept[i].bytes, static_cast<size_t>(seq) * size, size };
    }

    // Lets the library give `seq` a cell that stands at n. Returns where its state goes.
    std::vector<copy_region> read(llama_seq_id seq, int64_t n) {
        std::vector<uint8_t> plain;
        for (const io_step & step : layout.steps) {
            plain.insert(plain.end(), step.bytes.begin(), step.bytes.end());
        }
        // After the cell count comes the position of the cell's last token.
        const auto last = static_cast<llama_pos>(n - 1);
        std::memcpy(plain.data() + layout.steps[0].size, &last, sizeof(last));
        return tensors_of(library::read(memory, seq, std::move(plain)));
    }

    llama_memory_t           memory;
    recurrent_layout         layout;
    std::vector<copy_region> pieces;
    transfer &               copies;

    std::vector<tensor_buffer> kept;  // of each piece, those of all sequences one after the other
};

// A sequence that has the cells to itself gets those, all of them, that a cold run of it would have: position p lies in cell
// p mod their number. What is evaluated next then takes the same cells, and sums the same rows in the same order.
class window_state : public sequence_state {
public:
    window_state(llama_context * ctx, library::cache cache, const row_layout & rows, transfer & copies)
        : ctx(ctx), cache(cache), planes(planes_of(rows, cache.size())), row_bytes(rows.row_bytes() - rows.ext_bytes()),
          copies(copies) {}

    int64_t position(llama_seq_id seq) const override { return llama_memory_seq_pos_max(cache.memory(), seq) + 1; }

    size_t size(llama_seq_id seq) const override { return size_at(seq, position(seq)); }

    size_t size_at(llama_seq_id, int64_t n) const override { return static_cast<size_t>(n - first_seen(n)) * row_bytes; }

    void save(llama_seq_id seq, uint8_t * out, size_t size) override {
        save_rows(seq, first_seen(position(seq)), position(seq), out, size);
    }

    void save_rows(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) override {
        if (p0 < 0 || p1 <= p0 || p1 > position(seq) || !has(seq, p0, p1) || size != static_cast<size_t>(p1 - p0) * row_bytes) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " lacks rows of its window " + range_text(p0, p1) +
                                        ", or these do not have " + std::to_string(size) + " bytes");
        }
        const auto runs = runs_of(seq, p0, p1);
        copies.save_begin();
        each_region(planes, runs, p0, p1, p0, p1, [&](const copy_region & from, size_t at) { copies.save(from, out + at); });
        copies.load_end();  // what is evaluated next may take these cells
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) override {
        load_rows(seq, n, { { data, size, first_seen(n), n } });
    }

    void load_rows(llama_seq_id seq, int64_t n, const std::vector<row_span> & rows) override {
        const int64_t first = first_seen(n);
        int64_t       end   = first;
        for (const row_span & span : rows) {
            end = span.first == end && span.last > end && span.last - end <= n_rows(span) ? span.last : INT64_MAX;
        }
        if (end != n) {
            throw std::invalid_argument("these blocks do not have the rows " + range_text(first, n) + " of a window");
        }
        clear(seq);
        const bool    is_alone = cache.n_used() == 0;
        const int64_t begin    = is_alone ? std::max(n - cache.size(), int64_t(0)) : first;
        std::vector<llama_pos> pos(static_cast<size_t>(n - begin));
        std::iota(pos.begin(), pos.end(), static_cast<llama_pos>(begin));
        std::vector<int64_t> cells = is_alone ? std::vector<int64_t>() : cache.find(n - begin);
        for (int64_t each = begin; is_alone && each < n; ++each) {
            cells.push_back(each % cache.size());
        }
        const auto runs = take(cache, cells, seq, pos, begin);
        was_shared      = was_shared || !is_alone;
        copies.load_begin();
        for (const row_span & span : rows) {
            each_region(planes, runs, span.last - n_rows(span), span.last, span.first, span.last,
                        [&](const copy_region & to, size_t at) { copies.load(to, span.data + at); });
        }
    }

    void clear(llama_seq_id seq) override {
        llama_memory_seq_rm(cache.memory(), seq, -1, -1);
        if (cache.n_used() == 0) {
            llama_memory_clear(cache.memory(), false);  // what comes next begins at the first cell
        }
    }

    // A sequence whose company has left moves to where it would be without.
    void settle() override {
        llama_seq_id last   = -1;
        size_t       n_here = 0;
        for (llama_seq_id seq = 0; seq < static_cast<llama_seq_id>(llama_n_seq_max(ctx)); ++seq) {
            if (position(seq) > 0) {
                last = seq;
                ++n_here;
            }
        }
        const int64_t n = n_here == 1 && was_shared ? position(last) : 0;
        if (n > 0 && has(last, first_seen(n), n)) {
            std::vector<uint8_t> rows(size(last));
            save(last, rows.data(), rows.size());
            copies.finish();
            load(last, n, rows.data(), rows.size());
            copies.load_end();
            copies.finish();
        }
        was_shared = n_here > 1;
    }

private:
    // The first row that the token at n sees, at least the last one, which says where the sequence stands. Cells of rows
    // before it may be others' by now.
    int64_t first_seen(int64_t n) const {
        int64_t first = std::max(n - 1, int64_t(0));
        while (first > 0 && library::sees(ctx, n, first - 1)) {
            --first;
        }
        return first;
    }

    // Whether rows [p0, p1) of `seq` are there.
    bool has(llama_seq_id seq, int64_t p0, int64_t p1) const {
        const auto runs = runs_of(seq, p0, p1);
        return std::accumulate(runs.begin(), runs.end(), p0, [](int64_t n, const cell_run & run) { return n + run.count; }) == p1;
    }

    // Where those of rows [p0, p1) of `seq` lie that are there.
    std::vector<cell_run> runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const {
        std::vector<cell_run> runs;
        for (int64_t cell = 0; cell < cache.size(); ++cell) {
            if (cache.has(cell, seq, static_cast<llama_pos>(p0), static_cast<llama_pos>(p1))) {
                append_run(runs, { cell, cache.position(cell), 1 });
            }
        }
        return runs;
    }

    int64_t n_rows(const row_span & span) const { return static_cast<int64_t>(span.size / row_bytes); }

    llama_context *    ctx;
    library::cache     cache;
    std::vector<plane> planes;
    size_t             row_bytes;
    transfer &         copies;
    bool               was_shared = false;  // there were several sequences at once
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
        if (llama_state_seq_set_data(ctx, data, size, seq) == 0) {
            clear(seq);
            throw std::invalid_argument("llama.cpp refused the state");
        }
        if (position(seq) != n) {
            clear(seq);
            throw std::invalid_argument("the state restored to another position than it was saved at");
        }
    }

    void clear(llama_seq_id seq) override { llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1); }

private:
    llama_context * ctx;
};

}  // namespace

state_list states_of(llama_context * ctx, const memory_parts & parts, const memory_layout & layout, transfer & copies,
                     size_t n_marks) {
    state_list states;
    if (parts.kind == memory_kind::opaque) {
        states.push_back(std::make_unique<opaque_state>(ctx));
        return states;
    }
    if (parts.recurrent != nullptr) {
        n_marks = parts.window ? 0 : n_marks;
        states.push_back(std::make_unique<recurrent_state>(parts.recurrent, layout.recurrent, copies, n_marks));
    }
    if (parts.window) {
        states.push_back(std::make_unique<window_state>(ctx, parts.window, layout.window, copies));
    }
    return states;
}
