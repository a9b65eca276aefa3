#include "core/kv_state.h"

kv_state::kv_state(llama_context * context, llama_seq_id seq, const host_arena & pinned, size_t lag, bool has_marks,
                   bool defers, const store_settings * own_rows)
    : ctx(context) {
    if (ctx == nullptr) {
        throw std::invalid_argument("the context is null");
    }
    check_seq(seq);
    marks.assign(llama_n_seq_max(ctx), -1);
    parts     = parts_of(ctx);
    layout    = layout_of(ctx, parts, seq);
    recurrent = recurrent_memory_of(ctx);
    copies = std::make_unique<transfer>(ctx, layout.tensors(), layout.recurrent.regions(), pinned, lag);
    if (own_rows != nullptr) {
        if (parts.attention == nullptr) {
            throw std::runtime_error("this model's memory has no rows that could lie elsewhere");
        }
        auto elsewhere = std::make_unique<row_store>(ctx, *parts.attention, layout.rows, layout.hash, *copies, *own_rows);
        pool           = elsewhere.get();
        rows           = std::move(elsewhere);
    } else if (parts.attention != nullptr) {
        rows = std::make_unique<attention_rows>(*parts.attention, layout.rows, layout.hash, *copies, defers);
    }
    if (parts.recurrent != nullptr) {
        state = make_recurrent_state(*parts.recurrent, layout.recurrent, *copies, has_marks ? marks.size() : 0);
    } else if (parts.kind == memory_kind::opaque) {
        state = make_opaque_state(ctx);
    }
}

void kv_state::check_seq(llama_seq_id seq) const {
    const auto n_seqs = static_cast<llama_seq_id>(llama_n_seq_max(ctx));
    if (seq < 0 || seq >= n_seqs) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " is not in [0, " + std::to_string(n_seqs) + ")");
    }
}

// The position after that of the last of n tokens.
int64_t kv_state::position_after(llama_seq_id seq, int64_t n) const {
    return rows != nullptr && n > 0 ? rows->position(seq, n - 1) + 1 : n;
}

int64_t kv_state::n_tokens(llama_seq_id seq) const {
    check_seq(seq);
    return rows != nullptr ? rows->end_of(seq) : state->position(seq);
}

int64_t kv_state::position(llama_seq_id seq, int64_t n) const {
    check_seq(seq);
    return rows != nullptr ? rows->position(seq, n) : n;
}

void kv_state::add_image(llama_seq_id seq, int64_t columns, int64_t count) {
    check_seq(seq);
    movable_rows().add_image(seq, columns, count);
}

row_memory & kv_state::movable_rows() const {
    if (rows == nullptr) {
        throw std::invalid_argument("this model's memory has no rows that could be moved on their own");
    }
    return *rows;
}

sequence_state & kv_state::own_state() const {
    if (state == nullptr) {
        throw std::invalid_argument("this model has no state besides its rows");
    }
    return *state;
}

void kv_state::save_rows(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    check_seq(seq);
    movable_rows().save(seq, p0, p1, out, size);
}

void kv_state::load_rows(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) {
    mark_of(seq) = -1;
    movable_rows().load(seq, p0, spans);
}

held_rows::handle kv_state::hold(llama_seq_id seq, int64_t p0, int64_t p1) {
    check_seq(seq);
    return movable_rows().hold(seq, p0, p1);
}

void kv_state::reserve(int64_t n, bool in_parts) {
    if (rows != nullptr) {
        rows->reserve(n, in_parts);
    }
}

size_t kv_state::state_size(llama_seq_id seq) const {
    check_seq(seq);
    return state != nullptr ? sizeof(block_header) + state->size(seq) : 0;
}

// Throws unless `seq` stands at n, where something is to be `done`.
void kv_state::check_end(llama_seq_id seq, int64_t n, const char * done) const {
    check_seq(seq);
    const int64_t at = own_state().position(seq);
    if (n <= 0 || n_tokens(seq) != n || at != position_after(seq, n)) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " stands at " + std::to_string(at) + ", it cannot be " +
                                    done + " at " + std::to_string(n));
    }
}

void kv_state::save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size) {
    check_end(seq, n, "saved");
    const size_t needed = state_size(seq);
    if (size != needed) {
        throw std::invalid_argument("the state needs a buffer of " + std::to_string(needed) + " bytes, not " +
                                    std::to_string(size));
    }
    state->save(seq, out + sizeof(block_header), size - sizeof(block_header));
    write_header(out, block_kind::state, layout.hash, 0, n);
}

void kv_state::check_state(int64_t n, const uint8_t * data, size_t size) const {
    const block_header header = read_header(data, size, block_kind::state, layout.hash);
    if (header.p1 != n || n <= 0) {
        throw std::invalid_argument("the state belongs to position " + std::to_string(header.p1) + ", not " + std::to_string(n));
    }
}

void kv_state::load_state(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) {
    check_seq(seq);
    sequence_state & state = own_state();
    check_state(n, data, size);
    if (rows != nullptr && n_tokens(seq) != n) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " holds " + std::to_string(n_tokens(seq)) +
                                    " rows, a state at " + std::to_string(n) + " does not belong there");
    }
    mark_of(seq) = -1;
    state.load(seq, position_after(seq, n), data + sizeof(block_header), size - sizeof(block_header));
    copies->load_end();
}

void kv_state::load_prefix(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans, int64_t n,
                           const uint8_t * data, size_t size) {
    int64_t &        mark  = mark_of(seq);
    row_memory &     rows  = movable_rows();
    sequence_state & state = own_state();
    check_state(n, data, size);
    if (spans.empty() || spans.back().last != n) {
        throw std::invalid_argument("a state at " + std::to_string(n) + " does not belong behind these rows");
    }
    const int64_t position = rows.check_load(seq, p0, spans);
    mark                   = -1;
    state.load(seq, position, data + sizeof(block_header), size - sizeof(block_header));
    try {
        rows.load_checked(seq, p0, spans);
    } catch (...) {
        finish();
        clear(seq);
        throw;
    }
    copies->load_end();
}

int64_t & kv_state::mark_of(llama_seq_id seq) {
    check_seq(seq);
    return marks[static_cast<size_t>(seq)];
}

void kv_state::mark(llama_seq_id seq, int64_t n) {
    int64_t & mark = mark_of(seq);
    if (!has_marks()) {
        throw std::invalid_argument("there is no room for marks");
    }
    check_end(seq, n, "marked");
    mark = -1;
    state->mark(seq);
    mark = n;
}

int64_t kv_state::reset(llama_seq_id seq) {
    const int64_t n = mark_of(seq);
    if (n < 0 || n_tokens(seq) < n) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " has no mark to go back to");
    }
    rows->truncate(seq, n);
    state->reset(seq, position_after(seq, n));
    return n;
}

void kv_state::rewind(llama_seq_id seq, int64_t n) {
    check_seq(seq);
    if (n < 0 || n > n_tokens(seq)) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " ends at " + std::to_string(n_tokens(seq)) +
                                    ", it cannot be rewound to " + std::to_string(n));
    }
    if (n == 0) {
        clear(seq);
        return;
    }
    row_memory & rows = movable_rows();
    mark_of(seq)      = -1;
    rows.truncate(seq, n);
}

void kv_state::clear(llama_seq_id seq) {
    mark_of(seq) = -1;
    wipe(seq);
    if (rows == nullptr) {
        finish();
        cut(seq, 0);
        return;
    }
    rows->truncate(seq, 0);
    if (parts.recurrent != nullptr) {
        parts.recurrent->seq_rm(seq, -1, -1);
    }
}

bool kv_state::cut(llama_seq_id seq, int64_t n) {
    check_seq(seq);
    const llama_pos pos = rows != nullptr ? rows->cut(seq, n) : static_cast<llama_pos>(n);
    return pos >= 0 && llama_memory_seq_rm(llama_get_memory(ctx), seq, pos, -1);
}

// The library begins a sequence by multiplying the state that lies in its cell by zero. What is not a number, from a
// prompt that the model cannot bear or from a crafted block, would stay, and spoil all that come after.
void kv_state::wipe(llama_seq_id seq) {
    if (recurrent == nullptr || recurrent->seq_pos_max(seq) < 0) {
        return;
    }
    recurrent->set_rs_idx(seq, 0);  // a sequence begins in the first plane, wherever a rollback has left it
    recorder stream;
    recurrent->state_write(stream, seq);
    copies->wipe(regions_of(stream.steps));
}
