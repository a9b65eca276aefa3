// What a sequence holds beside its rows, at one position, as bytes behind a block's header. A sequence may have several; the
// pending hidden state of a draft head would be another, saved beside these and not within them.
#pragma once

#include "core/row_memory.h"

// Sizes are bytes without the header. Sequence ids and block headers are the caller's to check.
class sequence_state {
public:
    virtual ~sequence_state() = default;

    // The position after that of the token at which the state of `seq` stands.
    virtual int64_t position(llama_seq_id seq) const = 0;

    // Of that of `seq`, and of one at position n where that makes a difference.
    virtual size_t size(llama_seq_id seq) const = 0;
    virtual size_t size_at(llama_seq_id seq, int64_t) const { return size(seq); }

    // The copies may be on their way when it returns, see transfer.h.
    virtual void save(llama_seq_id seq, uint8_t * out, size_t size) = 0;

    // Makes what was saved at position `n` the state of `seq`: what is computed after `transfer::load_end` sees it.
    // Of a size that is not right, as that of an opaque one may be, std::invalid_argument.
    virtual void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) = 0;

    // The same of a window, whose rows are numbered by position: of some of its rows, and from blocks that have all of them,
    // each up to the last row of its span. std::invalid_argument where these are not there.
    virtual void save_rows(llama_seq_id, int64_t, int64_t, uint8_t *, size_t) { has_no_rows(); }
    virtual void load_rows(llama_seq_id, int64_t, const std::vector<row_span> &) { has_no_rows(); }

    // Drops it.
    virtual void clear(llama_seq_id seq) = 0;

    // To be called before anything is evaluated.
    virtual void settle() {}

    // Whether states can be kept where they lie: `mark` does so with that of `seq`, and `reset` makes it the state again,
    // at the position n that it had.
    virtual bool has_marks() const { return false; }
    virtual void mark(llama_seq_id) {}
    virtual void reset(llama_seq_id, int64_t) {}

private:
    [[noreturn]] static void has_no_rows() { throw std::invalid_argument("this state has no window"); }
};

using state_list = std::vector<std::unique_ptr<sequence_state>>;

// What sequences of `ctx` hold besides rows, in the order of a block's bytes: a recurrent cell, the rows that layers with a
// window see, or, of an opaque memory, the library's own state of the whole sequence, rows and all. There is room for
// `n_marks` marks, of the sequences from 0 on, where all of it can be kept. `copies` must outlive them.
state_list states_of(llama_context * ctx, const memory_parts & parts, const memory_layout & layout, transfer & copies,
                     size_t n_marks);
