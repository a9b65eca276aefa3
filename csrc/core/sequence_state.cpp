#include "core/sequence_state.h"

#include "core/cells.h"
#include "device/tensor_buffer.h"

#include <numeric>

namespace {

class recurrent_state : public sequence_state {
public:
    recurrent_state(llama_memory_recurrent & memory, const recurrent_layout & layout, transfer & copies, size_t n_marks)
        : memory(memory), layout(layout), pieces(regions_of(layout.steps)), copies(copies) {
        for (size_t i = 0; i < pieces.size() && n_marks > 0; ++i) {
            kept.push_back(allocate_zeros(ggml_backend_buffer_get_type(buffer_of(pieces[i].tensor)), pieces[i].size * n_marks));
        }
    }

    int64_t position(llama_seq_id seq) const override { return memory.seq_pos_max(seq) + 1; }

    size_t size(llama_seq_id) const override { return layout.n_bytes; }

    void save(llama_seq_id seq, uint8_t * out, size_t) override {
        copies.save_staged(written(seq), out);
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) override {
        copies.load_begin();
        size_t at = 0;
        try {
            read(seq, n, [&](const copy_region & to) {
                if (to.size > size - at) {
                    throw std::runtime_error("llama.cpp asked for more tensor data than was given");
                }
                copies.load(to, data + at);
                at += to.size;
            });
        } catch (...) {
            copies.finish();
            throw;
        }
    }

    void clear(llama_seq_id seq) override { memory.seq_rm(seq, -1, -1); }

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
        read(seq, n, [&](const copy_region & to) { copies.move(kept_at(seq, i++, to.size), to); });
    }

private:
    // Where the state of `seq` lies now.
    std::vector<copy_region> written(llama_seq_id seq) const {
        recorder stream;
        memory.state_write(stream, seq);
        std::vector<copy_region> regions = regions_of(stream.steps);
        size_t                   n_bytes = 0;
        for (const copy_region & region : regions) {
            n_bytes += region.size;
        }
        if (n_bytes != layout.n_bytes) {
            throw std::runtime_error("llama.cpp wrote another amount of recurrent state than before");
        }
        return regions;
    }

    // Where piece i of the marked state of `seq` lies.
    copy_region kept_at(llama_seq_id seq, size_t i, size_t size) {
        if (i >= kept.size() || size != pieces[i].size) {
            throw std::runtime_error("llama.cpp wrote a state in another way than before");
        }
        return { &kept[i].bytes, static_cast<size_t>(seq) * size, size };
    }

    // Lets the library give `seq` a cell that stands at n; `fill` fills it.
    void read(llama_seq_id seq, int64_t n, stream_reader::filler fill) {
        std::vector<uint8_t> plain;
        for (const io_step & step : layout.steps) {
            plain.insert(plain.end(), step.bytes.begin(), step.bytes.end());
        }
        // After the cell count comes the position of the cell's last token.
        const auto last = static_cast<llama_pos>(n - 1);
        std::memcpy(plain.data() + layout.steps[0].size, &last, sizeof(last));
        stream_reader reader(std::move(plain), std::move(fill));
        memory.state_read(reader, seq);
    }

    llama_memory_recurrent & memory;
    recurrent_layout         layout;
    std::vector<copy_region> pieces;
    transfer &               copies;

    std::vector<tensor_buffer> kept;  // of each piece, those of all sequences one after the other
};

// A sequence that has the cells to itself gets those, all of them, that a cold run of it would have: position p lies in cell
// p mod their number. What is evaluated next then takes the same cells, and sums the same rows in the same order.
class window_state : public sequence_state {
public:
    window_state(llama_kv_cache & cache, const row_layout & rows, const llama_hparams & hparams, transfer & copies)
        : cache(cache), books(cache.get_cells(0)), planes(planes_of(rows, cache.get_size())), row_bytes(rows.row_bytes() - rows.ext_bytes()),
          hparams(hparams), copies(copies) {}

    int64_t position(llama_seq_id seq) const override { return cache.seq_pos_max(seq) + 1; }

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
        std::vector<cell_run> runs;
        for (const auto & [pos, cell] : books.seq_pos_get(seq)) {
            append_run(runs, { cell, pos, 1 });
        }
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
        const bool    is_alone = books.get_used() == 0;
        const int64_t begin    = is_alone ? std::max(n - cache.get_size(), int64_t(0)) : first;
        std::vector<llama_pos> pos(static_cast<size_t>(n - begin));
        std::iota(pos.begin(), pos.end(), static_cast<llama_pos>(begin));
        llama_kv_cache::slot_info ring{ 0, 0, { 0 }, { {} } };
        for (const llama_pos each : pos) {
            ring.idxs[0].push_back(static_cast<uint32_t>(each) % cache.get_size());
        }
        const cell_batch batch(seq, std::move(pos));
        const auto       runs = batch.take(cache, is_alone ? ring : batch.slots_in(cache), begin);
        was_shared            = was_shared || !is_alone;
        copies.load_begin();
        for (const row_span & span : rows) {
            each_region(planes, runs, span.last - n_rows(span), span.last, span.first, span.last,
                        [&](const copy_region & to, size_t at) { copies.load(to, span.data + at); });
        }
    }

    void clear(llama_seq_id seq) override {
        cache.seq_rm(seq, -1, -1);
        if (books.get_used() == 0) {
            cache.clear(false);  // what comes next begins at the first cell
        }
    }

    // A sequence whose company has left moves to where it would be without.
    void settle() override {
        llama_seq_id last   = -1;
        size_t       n_here = 0;
        for (llama_seq_id seq = 0; seq < static_cast<llama_seq_id>(cache.get_n_seq_max()); ++seq) {
            if (position(seq) > 0) {
                last = seq;
                ++n_here;
            }
        }
        if (n_here == 1 && was_shared && has(last, first_seen(position(last)), position(last))) {
            std::vector<uint8_t> rows(size(last));
            save(last, rows.data(), rows.size());
            copies.finish();
            load(last, position(last), rows.data(), rows.size());
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
        while (first > 0 && !llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, first - 1, n)) {
            --first;
        }
        return first;
    }

    // Whether rows [p0, p1) of `seq` are there.
    bool has(llama_seq_id seq, int64_t p0, int64_t p1) const {
        const auto & cells = books.seq_pos_get(seq);
        const auto   at    = [&](int64_t p) { return cells.lower_bound({ static_cast<llama_pos>(p), 0 }); };
        return std::distance(at(p0), at(p1)) == p1 - p0;
    }

    int64_t n_rows(const row_span & span) const { return static_cast<int64_t>(span.size / row_bytes); }

    llama_kv_cache &       cache;
    const llama_kv_cells & books;
    std::vector<plane>     planes;
    size_t                 row_bytes;
    const llama_hparams &  hparams;
    transfer &             copies;
    bool                   was_shared = false;  // there were several sequences at once
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
        n_marks = parts.window == nullptr ? n_marks : 0;
        states.push_back(std::make_unique<recurrent_state>(*parts.recurrent, layout.recurrent, copies, n_marks));
    }
    if (parts.window != nullptr) {
        states.push_back(std::make_unique<window_state>(*parts.window, layout.window, compat::hparams_of(ctx), copies));
    }
    return states;
}
