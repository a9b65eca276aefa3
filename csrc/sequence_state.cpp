#include "sequence_state.h"

#include "llama-memory-recurrent.h"

#include <stdexcept>
#include <string>

namespace {

class recurrent_state : public sequence_state {
public:
    recurrent_state(llama_memory_recurrent & memory, const recurrent_layout & layout, transfer & copies)
        : memory(memory), layout(layout), copies(copies) {}

    int64_t position(llama_seq_id seq) const override { return memory.seq_pos_max(seq) + 1; }

    size_t size(llama_seq_id) const override { return layout.n_bytes; }

    void save(llama_seq_id seq, uint8_t * out, size_t) override {
        recorder stream;
        memory.state_write(stream, seq);
        std::vector<copy_region> regions;
        size_t                   n_bytes = 0;
        for (const io_step & step : stream.steps) {
            if (step.tensor != nullptr) {
                regions.push_back({ step.tensor, step.offset, step.size });
                n_bytes += step.size;
            }
        }
        if (n_bytes != layout.n_bytes) {
            throw std::runtime_error("llama.cpp wrote another amount of recurrent state than before");
        }
        copies.save_staged(regions, out);
    }

    void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) override {
        if (size != layout.n_bytes) {
            throw std::invalid_argument("a state has " + std::to_string(layout.n_bytes) +
                                        " bytes behind its header, not " + std::to_string(size));
        }
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
        copies.load_begin();
        stream_reader reader(plain.take(), copies, data, size);
        try {
            memory.state_read(reader, seq);
        } catch (...) {
            copies.finish();
            throw;
        }
        copies.load_end();
    }

private:
    llama_memory_recurrent & memory;
    recurrent_layout         layout;
    transfer &               copies;
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
                                                     transfer & copies) {
    return std::make_unique<recurrent_state>(memory, layout, copies);
}

std::unique_ptr<sequence_state> make_opaque_state(llama_context * ctx) {
    return std::make_unique<opaque_state>(ctx);
}
