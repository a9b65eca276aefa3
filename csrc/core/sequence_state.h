// The state of a sequence at one position, besides rows that can be cut, as bytes after a block's header: a state of all that
// it has seen, or the rows that layers with a window still see, or both. Sizes are bytes without the header. Sequence ids and
// block headers are the caller's to check. Copies may be on their way when a function returns, see transfer.h.
#pragma once

#include "core/row_memory.h"

class sequence_state {
public:
    virtual ~sequence_state() = default;

    // The position after the token at which the state of `seq` stands.
    virtual int64_t position(llama_seq_id seq) const = 0;

    virtual size_t size(llama_seq_id seq) const = 0;
    virtual void   save(llama_seq_id seq, uint8_t * out, size_t size) = 0;

    // Makes the bytes saved at position `n` the state of `seq` for evaluations after `transfer::load_end`.
    // Of a wrong size, which an opaque one may have, std::invalid_argument.
    virtual void load(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) = 0;

    virtual void clear(llama_seq_id seq) = 0;

    // Whether states can be kept where they lie: `mark` keeps that of `seq`, and `reset` makes it the state again,
    // at the position n that it had.
    virtual bool has_marks() const { return false; }
    virtual void mark(llama_seq_id) {}
    virtual void reset(llama_seq_id, int64_t) {}
};

// The recurrent cell of sequences of `ctx`, or, of an opaque memory, the library's own state of the whole sequence, rows and
// all; null where a memory has neither. There is room for `n_marks` marks, of the sequences from 0 on, where that is all of
// their state. `copies` must outlive it.
std::unique_ptr<sequence_state> state_of(llama_context * ctx, const memory_parts & parts, const memory_layout & layout,
                                         transfer & copies, size_t n_marks);

// The rows of layers with a window, numbered by position. A sequence that has the cells to itself gets those, all of them, that
// a cold run of it would have: position p lies in cell p mod their number. The next evaluation then takes the same cells,
// and sums the same rows in the same order.
class window_rows {
public:
    // `copies` must outlive this.
    window_rows(llama_context * ctx, library::cache cache, const row_layout & rows, transfer & copies);

    int64_t position(llama_seq_id seq) const { return llama_memory_seq_pos_max(cache.memory(), seq) + 1; }

    // The first row that the token at n attends to, at least the last one, where the sequence stands. Cells of rows
    // before it may be others' by now.
    int64_t first_seen(int64_t n) const;

    // Of the rows that the token at n attends to.
    size_t size(int64_t n) const { return static_cast<size_t>(n - first_seen(n)) * row_bytes; }

    // Rows [p0, p1); std::invalid_argument if they are not there or have another size.
    void save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size);

    // All that the token at n attends to, from blocks without a header, of each the rows up to the last one of its span.
    // std::invalid_argument where these are not there.
    void load(llama_seq_id seq, int64_t n, const std::vector<row_span> & spans);

    void clear(llama_seq_id seq);

    // Drops the rows of `seq` from n on, which its last evaluation appended. Returns false, and changes nothing, where
    // rows are missing that the token at n attends to: an evaluation in parts may have taken their cells.
    bool cut(llama_seq_id seq, int64_t n);

    // To be called before anything is evaluated: a sequence whose company has left moves to where it would be without.
    void settle();

private:
    std::vector<cell_run> runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const;
    bool                  is_ring(llama_seq_id seq, int64_t n) const;
    void                  return_to_ring(llama_seq_id seq, int64_t n);
    int64_t               n_rows(const row_span & span) const { return static_cast<int64_t>(span.size / row_bytes); }

    llama_context *    ctx;
    library::cache     cache;
    std::vector<plane> planes;
    size_t             row_bytes;
    transfer &         copies;
    bool               was_shared = false;  // there were several sequences at once
};
