#include "core/sequence_state.h"

namespace {

class recurrent_state : public sequence_state {
public:
    recurrent_state(llama_memory_recurrent & memory, const recurrent_layout & layout, transfer & copies, size_t n_marks)
        : memory(memory), layout(layout), copies(copies), n_marks(n_marks) {
        if (n_marks > 0) {
            copies.reserve(regions_of(layout.steps), n_marks);
        }
    }

    int64_t position(llama_seq_id seq) const override { return memory.seq_pos_max(seq) + 1; }

    size_t size(llama_seq_id) const override { return layout.n_bytes; }

    void save(llama_seq_id seq, uint8_t * out, size_t) override {
        copies.save_staged(written(seq), out);
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) override {
        if (size != layout.n_bytes) {
            throw std::invalid_argument("a state has " + std::to_string(layout.n_bytes) +
                                        " bytes behind its header, not " + std::to_string(size));
        }
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

    bool has_marks() const override { return n_marks > 0; }

    void mark(llama_seq_id seq) override { copies.keep(written(seq), static_cast<size_t>(seq)); }

    void reset(llama_seq_id seq, int64_t n) override {
        size_t i = 0;
        read(seq, n, [&](const copy_region & to) { copies.put_back(static_cast<size_t>(seq), i++, to); });
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

    // Lets the library give `seq` a cell that stands at n; `fill` fills it.
    void read(llama_seq_id seq, int64_t n, stream_reader::filler fill) {
        byte_writer plain;
        for (size_t i = 0; i < layout.steps.size(); ++i) {
            const io_step & step = layout.steps[i];
            if (step.tensor != nullptr) {
                continue;
            }
            if (i == 1) {  // after the cell count comes the position of the cell's last token
                plain.put(static_cast<llama_pos>(n - 1));
            } else {
                plain.put_all(step.bytes);
            }
        }
        stream_reader reader(plain.take(), std::move(fill));
        memory.state_read(reader, seq);
    }

    llama_memory_recurrent & memory;
    recurrent_layout         layout;
    transfer &               copies;
    size_t                   n_marks;
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

private:
    void clear(llama_seq_id seq) { llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1); }

    llama_context * ctx;
};

}  // namespace

std::unique_ptr<sequence_state> make_recurrent_state(llama_memory_recurrent & memory, const recurrent_layout & layout,
                                                     transfer & copies, size_t n_marks) {
    return std::make_unique<recurrent_state>(memory, layout, copies, n_marks);
}

std::unique_ptr<sequence_state> make_opaque_state(llama_context * ctx) {
    return std::make_unique<opaque_state>(ctx);
}
