// Rows of one attention cache: out of a sequence into a block, and from blocks to the end of a sequence.
//
// A row is named by its position, and a sequence's rows are those of positions 0, 1, 2 ...: `runs_of` and `claim_cells`
// are the two places that know so. Where the bytes lie on the device is known by `planes` alone.
#pragma once

#include "layout.h"
#include "transfer.h"

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// Positions [first, last) out of the saved block of `size` bytes at `data`.
struct row_span {
    const uint8_t * data;
    size_t          size;
    int64_t         first;
    int64_t         last;
};

// Checks positions and sizes before it touches the cache and throws std::invalid_argument; the sequence is unchanged
// then. Copies may be on their way when a function returns, see transfer.h. Sequence ids are the caller's to check.
class attention_rows {
public:
    // `cache` and `copies` must outlive this; `hash` is that of the whole memory's layout, which blocks carry.
    attention_rows(llama_kv_cache & cache, const row_layout & layout, uint64_t hash, transfer & copies);

    // The position after the last row of `seq`.
    int64_t end_of(llama_seq_id seq) const;

    // Bytes of the block that holds rows [p0, p1), which no file can have if p1 is beyond `last_position`: that throws.
    size_t size(int64_t p0, int64_t p1) const;

    // Rows [p0, p1) of `seq` into a block of exactly `size(p0, p1)` bytes.
    void save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size);

    // Appends the rows of `spans`, which follow each other from p0 on, to `seq`, which ends at p0.
    void load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans);

    // Drops the rows from n on; no copy may be on its way.
    void truncate(llama_seq_id seq, int64_t n);

private:
    // Cells [cell, cell + count) hold positions [pos, pos + count).
    struct run {
        int64_t cell, pos, count;
    };

    // `count` pieces of one token's `row` bytes each, a `stride` apart on the device: tensors of the same kind that lie
    // at equal distances, such as K of all layers, are one of these, and rows of all move in one copy.
    struct plane {
        ggml_tensor tensor;  // from the first piece to the end of the last
        size_t      row;
        size_t      count;
        size_t      stride;
    };

    void             join_planes(const std::vector<row_tensor> & tensors);
    std::vector<run> runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const;
    void             check_spans(int64_t p0, const std::vector<row_span> & spans) const;
    void             append(llama_seq_id seq, const std::vector<row_span> & spans);
    void             claim_cells(llama_seq_id seq, const std::vector<row_span> & spans);

    template <typename F>
    void each_region(const std::vector<run> & runs, int64_t p0, int64_t p1, int64_t first, int64_t last, const F & move);

    llama_kv_cache &   cache;
    row_layout         layout;
    size_t             row_bytes;
    uint64_t           hash;
    transfer &         copies;
    std::vector<plane> planes;  // in the order of a block's bytes
};
