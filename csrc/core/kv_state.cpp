#include "core/kv_state.h"

kv_state::kv_state(llama_context * context, llama_seq_id seq, const host_arena & pinned, size_t lag, bool has_marks,
                   bool defers)
    : ctx(context) {
    if (ctx == nullptr) {
        throw std::invalid_argument("the context is null");
    }
    check_seq(seq);
    marks.assign(llama_n_seq_max(ctx), -1);
    parts  = library::parts_of(ctx);
    layout = layout_of(ctx, parts, seq);
    copies = std::make_unique<transfer>(ctx, layout.tensors(), regions_of(layout.recurrent.steps), pinned, lag);
    if (!parts.sets.empty()) {
        rows = std::make_unique<attention_rows>(llama_get_memory(ctx), parts.sets, layout.rows, layout.hash, *copies, defers);
    }
    states = states_of(ctx, parts, layout, *copies, has_marks && rows != nullptr ? marks.size() : 0);
}

void kv_state::move_rows(const row_maker & make) {
    if (parts.sets.size() != 1 || parts.window) {
        throw std::runtime_error("this model's memory has no rows of one kind that could lie elsewhere");
    }
    rows = make(ctx, parts, layout, *copies);
    parts.sets.clear();
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
    return rows != nullptr ? rows->end_of(seq) : states[0]->position(seq);
}

int64_t kv_state::position(llama_seq_id seq, int64_t n) const {
    check_seq(seq);
    return rows != nullptr ? rows->position(seq, n) : n;
}

row_memory & kv_state::movable_rows() const {
    if (rows == nullptr) {
        throw std::invalid_argument("this model's memory has no rows that could be moved on their own");
    }
    return *rows;
}

row_memory & kv_state::movable_rows(llama_seq_id seq) const {
    check_seq(seq);
    return movable_rows();
}

const state_list & kv_state::own_states() const {
    if (states.empty()) {
        throw std::invalid_argument("this model has no state besides its rows");
    }
    return states;
}

void kv_state::load_rows(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) {
    mark_of(seq) = -1;
    movable_rows().check_load(seq, p0, spans);
    rows->load_checked(seq, p0, spans);
}

void kv_state::reserve(int64_t n, bool in_parts) {
    for (const auto & state : states) {
        state->settle();
    }
    if (rows != nullptr) {
        rows->reserve(n, in_parts);
    }
}

size_t kv_state::state_size(llama_seq_id seq) const {
    check_seq(seq);
    size_t size = states.empty() ? 0 : sizeof(block_header);
    for (const auto & state : states) {
        size += state->size(seq);
    }
    return size;
}

// Throws unless `seq` stands at n, where something is to be `done`.
void kv_state::check_end(llama_seq_id seq, int64_t n, const char * done) const {
    check_seq(seq);
    for (const auto & state : own_states()) {
        const int64_t at = state->position(seq);
        if (n <= 0 || n_tokens(seq) != n || at != position_after(seq, n)) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " stands at " + std::to_string(at) +
                                        ", it cannot be " + done + " at " + std::to_string(n));
        }
    }
}

void kv_state::save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size) {
    check_end(seq, n, "saved");
    const size_t needed = state_size(seq);
    const size_t rest   = parts.kind == memory_kind::hybrid && parts.window ? states.back()->size(seq) : 0;
    if (size != needed && size != needed - rest) {
        throw std::invalid_argument("the state needs a buffer of " + std::to_string(needed) + " bytes, not " +
                                    std::to_string(size));
    }
    write_header(out, block_kind::state, layout.hash, 0, n);
    out += sizeof(block_header);
    for (const auto & state : states) {
        const size_t part = state->size(seq);
        if (size == needed || state != states.back()) {
            state->save(seq, out, part);
        }
        out += part;
    }
}

void kv_state::save_window(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    check_seq(seq);
    own_states().back()->save_rows(seq, p0, p1, out, size);
}

void kv_state::load_prefix(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans, int64_t n,
                           const uint8_t * data, size_t size, const std::vector<row_span> & window) {
    int64_t &          mark   = mark_of(seq);
    const state_list & states = own_states();
    const block_header header = read_header(data, size, block_kind::state, layout.hash);
    if (header.p1 != n || n <= 0) {
        throw std::invalid_argument("the state belongs to position " + std::to_string(header.p1) + ", not " + std::to_string(n));
    }
    const int64_t end = spans.empty() ? p0 : spans.back().last;
    if (n != end || (rows != nullptr && spans.empty() && n_tokens(seq) != n)) {
        throw std::invalid_argument("a state at " + std::to_string(n) + " does not belong behind these rows");
    }
    const int64_t position = spans.empty() ? position_after(seq, n) : movable_rows().check_load(seq, p0, spans);
    size_t        needed   = parts.kind == memory_kind::opaque ? size : sizeof(header);  // only the library knows that
    for (size_t i = 0; i < states.size() && parts.kind != memory_kind::opaque; ++i) {
        needed += states[i]->size_at(seq, position);
    }
    needed -= window.empty() ? 0 : states.back()->size_at(seq, position);
    if (size != needed) {
        throw std::invalid_argument("a state has " + std::to_string(needed) + " bytes there, not " + std::to_string(size));
    }
    mark = -1;
    try {
        const uint8_t * at = data + sizeof(header);
        for (const auto & state : states) {
            const size_t part = state == states.back() ? data + size - at : state->size_at(seq, position);
            if (window.empty() || state != states.back()) {
                state->load(seq, position, at, part);
            } else {
                state->load_rows(seq, position, window);
            }
            at += part;
        }
        if (!spans.empty()) {
            rows->load_checked(seq, p0, spans);
        }
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
    states[0]->mark(seq);
    mark = n;
}

int64_t kv_state::reset(llama_seq_id seq) {
    const int64_t n = mark_of(seq);
    if (n < 0 || n_tokens(seq) < n) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " has no mark to go back to");
    }
    rows->truncate(seq, n);
    states[0]->reset(seq, position_after(seq, n));
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
    if (rows != nullptr) {
        rows->truncate(seq, 0);
    } else {
        finish();
    }
    for (const auto & state : states) {
        state->clear(seq);
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
    if (parts.recurrent == nullptr || llama_memory_seq_pos_max(parts.recurrent, seq) < 0) {
        return;
    }
    library::begin_anew(parts.recurrent, seq);
    copies->wipe(regions_of(library::written(parts.recurrent, seq)));
}
