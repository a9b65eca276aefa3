#include "core/kv_state.h"

#include "library/context.h"

kv_state::kv_state(llama_context * context, llama_seq_id seq, size_t lag, bool has_marks, bool defers, const unfit_classes & unfit)
    : ctx(context) {
    if (ctx == nullptr) {
        throw std::invalid_argument("the context is null");
    }
    check_seq(seq);
    marks.assign(llama_n_seq_max(ctx), -1);
    n_history = llama_n_rs_seq(ctx);
    parts     = library::parts_of(ctx);
    layout    = read_layout(seq, unfit);
    copies = std::make_unique<transfer>(ctx, layout.tensors(), regions_of(layout.recurrent, layout.parts), host_arena::instance(), lag);
    if (!parts.sets.empty()) {
        rows = std::make_unique<attention_rows>(llama_get_memory(ctx), parts.sets, layout.rows, layout.hash, *copies, defers);
    }
    state = state_of(ctx, parts, layout, *copies, has_marks && rows != nullptr ? marks.size() : 0);
    if (parts.kind == memory_kind::hybrid && parts.window) {
        sliding = std::make_unique<window_rows>(ctx, parts.window, layout.window, *copies);
    }
}

// A memory that this extension cannot read, or that failed its trial, is saved as whole sequences, by the library itself.
memory_layout kv_state::read_layout(llama_seq_id seq, const unfit_classes & unfit) {
    const auto found = unfit.find(parts.type);
    try {
        if (found == unfit.end()) {
            return layout_of(ctx, parts, seq);
        }
        unread = found->second;
    } catch (const std::runtime_error & error) {
        unread = error.what();
    }
    parts.sets.clear();
    parts.kind = memory_kind::opaque;
    return layout_of(ctx, parts, seq);
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

// The position after the last of n tokens.
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

void kv_state::reserve(int64_t n, bool in_parts) {
    if (sliding != nullptr) {
        sliding->settle();
    }
    if (rows != nullptr) {
        rows->reserve(n, in_parts);
    }
}

size_t kv_state::state_size(llama_seq_id seq) const {
    check_seq(seq);
    size_t size = parts.kind == memory_kind::attention ? 0 : sizeof(block_header);
    size += state != nullptr ? state->size(seq) : 0;
    return size + (sliding != nullptr ? sliding->size(sliding->position(seq)) : 0);
}

void kv_state::check_state() const {
    if (parts.kind == memory_kind::attention) {
        throw std::invalid_argument("this model has no state besides its rows");
    }
}

void kv_state::check_window() const {
    if (sliding == nullptr) {
        throw std::invalid_argument("this model's state has no window");
    }
}

// Throws unless `seq` stands at n, where something is to be `done`.
void kv_state::check_end(llama_seq_id seq, int64_t n, const char * done) const {
    check_seq(seq);
    check_state();
    const int64_t at = state != nullptr ? state->position(seq) : sliding->position(seq);
    if (n <= 0 || n_tokens(seq) != n || at != position_after(seq, n) || (sliding != nullptr && at != sliding->position(seq))) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " stands at " + std::to_string(at) + ", it cannot be " +
                                    done + " at " + std::to_string(n));
    }
}

void kv_state::save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size) {
    check_end(seq, n, "saved");
    const size_t needed = state_size(seq);
    const size_t head   = sizeof(block_header) + (state != nullptr ? state->size(seq) : 0);
    if (size != needed && size != head) {
        throw std::invalid_argument("the state needs a buffer of " + std::to_string(needed) + " bytes, not " +
                                    std::to_string(size));
    }
    write_header(out, state_block, layout.hash, 0, n);
    if (state != nullptr) {
        state->save(seq, out + sizeof(block_header), head - sizeof(block_header));
    }
    if (size > head) {
        const int64_t end = sliding->position(seq);
        sliding->save(seq, sliding->first_seen(end), end, out + head, size - head);
    }
}

void kv_state::save_window(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    check_seq(seq);
    check_window();
    sliding->save(seq, p0, p1, out, size);
}

void kv_state::load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans, const uint8_t * data, size_t size,
                    const std::vector<row_span> & window) {
    int64_t & mark = mark_of(seq);
    if (data == nullptr) {
        movable_rows().check_load(seq, p0, spans);
        mark = -1;
        if (!spans.empty()) {
            rows->load_checked(seq, p0, spans);
        }
        return;
    }
    check_state();
    const int64_t      n      = spans.empty() ? p0 : spans.back().last;
    const block_header header = read_header(data, size, state_block, layout.hash);
    if (header.p1 != n || n <= 0 || (rows != nullptr && spans.empty() && n_tokens(seq) != n)) {
        throw std::invalid_argument("a state at " + std::to_string(header.p1) + " does not belong behind " + std::to_string(n) +
                                    " rows");
    }
    if (!window.empty()) {
        check_window();
    }
    const int64_t position = spans.empty() ? position_after(seq, n) : movable_rows().check_load(seq, p0, spans);
    size_t        head     = size;  // of an opaque state only the library has that
    if (parts.kind != memory_kind::opaque) {
        head = sizeof(header) + (state != nullptr ? state->size(seq) : 0);
    }
    const size_t needed = head + (sliding != nullptr && window.empty() ? sliding->size(position) : 0);
    if (size != needed) {
        throw std::invalid_argument("a state has " + std::to_string(needed) + " bytes there, not " + std::to_string(size));
    }
    mark = -1;
    try {
        if (state != nullptr) {
            state->load(seq, position, data + sizeof(header), head - sizeof(header));
        }
        if (sliding != nullptr) {
            const row_span rest{ data + head, size - head, sliding->first_seen(position), position };
            sliding->load(seq, position, window.empty() ? std::vector<row_span>{ rest } : window);
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

void kv_state::keep_history(bool keeps) {
    library::keep_states(ctx, keeps ? n_history : 0);
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
    // The evaluations since then have overwritten only what the first of them did not see.
    if (sliding != nullptr && !sliding->cut(seq, position(seq, n))) {
        throw std::runtime_error("sequence " + std::to_string(seq) + " no longer has the window of its mark");
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
    if (rows != nullptr) {
        rows->truncate(seq, 0);
    } else {
        finish();
    }
    if (state != nullptr) {
        state->clear(seq);
    }
    if (sliding != nullptr) {
        sliding->clear(seq);
    }
}

bool kv_state::cut(llama_seq_id seq, int64_t n) {
    if (n <= 0 || n > n_tokens(seq)) {
        return false;
    }
    const auto pos = static_cast<llama_pos>(position(seq, n));
    if (sliding != nullptr && !sliding->cut(seq, pos)) {
        return false;
    }
    if (rows != nullptr) {
        rows->truncate(seq, n);
    }
    return llama_memory_seq_rm(llama_get_memory(ctx), seq, pos, -1);
}

// The library starts a sequence by multiplying the state that lies in its cell by zero. A NaN, from a
// prompt that the model cannot bear or from a crafted block, would stay, and spoil all states after it.
void kv_state::wipe(llama_seq_id seq) {
    if (parts.recurrent == nullptr || llama_memory_seq_pos_max(parts.recurrent, seq) < 0) {
        return;
    }
    library::begin_anew(parts.recurrent, seq);
    copies->wipe(regions_of(library::written(parts.recurrent, seq), layout.parts));
}
