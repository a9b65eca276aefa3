// What a sequence holds beside its rows, at one position, as bytes behind a block's header. There are two kinds; the
// pending hidden state of a draft head would be a third, saved beside these and not within them.
#pragma once

#include "core/layout.h"

// Sizes are bytes without the header. Sequence ids and block headers are the caller's to check.
class sequence_state {
public:
    virtual ~sequence_state() = default;

    // The position after that of the token at which the state of `seq` stands.
    virtual int64_t position(llama_seq_id seq) const = 0;

    virtual size_t size(llama_seq_id seq) const = 0;

    // The copies may be on their way when it returns, see transfer.h.
    virtual void save(llama_seq_id seq, uint8_t * out, size_t size) = 0;

    // Makes what was saved at position `n` the state of `seq`: what is computed after `transfer::load_end` sees it.
    // std::invalid_argument if the bytes do not fit.
    virtual void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) = 0;

    // Whether states can be kept where they lie: `mark` does so with that of `seq`, and `reset` makes it the state again,
    // at the position n that it had.
    virtual bool has_marks() const { return false; }
    virtual void mark(llama_seq_id) {}
    virtual void reset(llama_seq_id, int64_t) {}
};

// The recurrent cell of a sequence. `memory` and `copies` must outlive it. There is room for `n_marks` marks, of the
// sequences from 0 on.
std::unique_ptr<sequence_state> make_recurrent_state(llama_memory_recurrent & memory, const recurrent_layout & layout,
                                                     transfer & copies, size_t n_marks);

// The library's own state of the whole sequence, rows and all. A failed `load` leaves the sequence empty.
std::unique_ptr<sequence_state> make_opaque_state(llama_context * ctx);
