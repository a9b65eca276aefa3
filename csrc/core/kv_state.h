// Rows and state of the sequences inside a llama_context, as blocks of bytes (block.h). This is Python's interface: it
// checks sequence ids, token counts and headers, and leaves the moving to the parts that the memory consists of.
//
// Wrong arguments throw std::invalid_argument before the sequence changes; errors of the library throw
// std::runtime_error. Where `is_async`, copies may still be on their way when a function returns: the
// buffers must live until `progress` is complete. One thread at a time: the one that owns the context.
// pyctl/_core.pyi has the contract of each call.
#pragma once

#include "core/attention_rows.h"
#include "core/sequence_state.h"

#include <functional>
#include <map>

class kv_state {
public:
    // `seq` must hold at least one token: the layout is read from the library's bytes of it. The context must
    // outlive this. `lag` is for tests, see transfer.h. With `marks` there is room on the device for a state of each
    // sequence, where the memory has states that can be moved. For `defers` see attention_rows.h.
    // A memory whose class is `unfit`, with its reason, is saved as a whole.
    using unfit_classes = std::map<std::string, std::string>;
    kv_state(llama_context * ctx, llama_seq_id seq, size_t lag, bool marks, bool defers, const unfit_classes & unfit = {});

    // Moves the rows, of which none is kept yet, to the memory that `make` returns, which may use the arguments as long as
    // it lives. std::runtime_error where rows are not of one kind, or not in the context.
    using row_maker = std::function<std::unique_ptr<row_memory>(llama_context *, const memory_parts &, const memory_layout &, transfer &)>;
    void move_rows(const row_maker & make);

    memory_kind         kind() const { return parts.kind; }
    const std::string & type() const { return parts.type; }
    const std::string & layout_text() const { return layout.text; }

    // Why the memory is opaque although its class is known: it is unfit, or written in an unknown order. Else empty.
    const std::string & reason() const { return unread; }

    // How many tokens sliding layers see, and the cells for these; 0 if there are none.
    std::pair<int64_t, int64_t> window() const { return { parts.n_seen, parts.window ? parts.window.size() : 0 }; }

    int64_t n_tokens(llama_seq_id seq) const;
    int64_t position(llama_seq_id seq, int64_t n) const;

    // The rows that can be moved; std::invalid_argument if none can, or without such a sequence.
    row_memory & movable_rows() const;
    row_memory & movable_rows(llama_seq_id seq) const;

    bool can_hold() const { return rows != nullptr; }
    void reserve(int64_t n, bool in_parts);

    void save_rows(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
        movable_rows(seq).save(seq, p0, p1, out, size);
    }
    void fetch(held_rows::handle held, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
        movable_rows().fetch(held, p0, p1, out, size);
    }

    size_t state_size(llama_seq_id seq) const;  // 0 for kind attention
    void   save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size);
    void   save_window(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size);

    // Rows, and unless `data` is null the state at their end, whose last rows may be in `window`. The state is on its way
    // first, so that its copy runs while the rows find their cells; if they find none, `seq` is empty.
    void load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans, const uint8_t * data, size_t size,
              const std::vector<row_span> & window);

    bool has_marks() const { return state != nullptr && state->has_marks(); }

    // Has the next evaluations keep the states before their last token, to which `cut` returns, or not.
    void keep_history(bool keeps);

    void    mark(llama_seq_id seq, int64_t n);
    int64_t reset(llama_seq_id seq);

    void rewind(llama_seq_id seq, int64_t n);

    bool cut(llama_seq_id seq, int64_t n);
    void clear(llama_seq_id seq);

    bool is_async() const { return copies->is_async(); }
    void finish() { copies->finish(); }

    copy_progress & progress() { return copies->progress(); }

private:
    void      check_seq(llama_seq_id seq) const;
    void      check_state() const;
    void      check_window() const;
    void      check_end(llama_seq_id seq, int64_t n, const char * done) const;
    int64_t   position_after(llama_seq_id seq, int64_t n) const;
    void      wipe(llama_seq_id seq);
    int64_t & mark_of(llama_seq_id seq);

    memory_layout read_layout(llama_seq_id seq, const unfit_classes & unfit);

    llama_context *                 ctx;
    uint32_t                        n_history;  // states before the last that a recurrent cell has room for
    memory_parts                    parts;
    memory_layout                   layout;
    std::string                     unread;
    std::unique_ptr<transfer>       copies;
    std::unique_ptr<row_memory>     rows;     // null for kind opaque, and without attention
    std::unique_ptr<sequence_state> state;    // null for kind attention, and where windows are all that there is
    std::unique_ptr<window_rows>    sliding;  // null without windows
    std::vector<int64_t>            marks;    // of each sequence, -1 for none
};
