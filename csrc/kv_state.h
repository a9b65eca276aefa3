// Rows and state of one sequence inside a llama_context: what they look like, how to copy them out and in.
//
// rows   K and V of a token range in the attention layers. One buffer holds rows [p0, p1): a header, the cells' extra
//        positions where the model has them, then per layer all K rows, then per layer all V rows. With a transposed V
//        (no flash attention) a layer's V part holds one run of p1 - p0 elements per embedding dimension.
// state  the recurrent tensors of one cell at one position, behind a header. For memory kinds this extension does not
//        know, the library's own whole-sequence state behind the same header.
#pragma once

#include "state_io.h"
#include "transfer.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class llama_kv_cache;
class llama_memory_recurrent;

enum class memory_kind { attention, hybrid, whole };

// What stands in front of every buffer. Sizes are bytes, positions token counts.
struct block_header {
    char     magic[4];  // "ROWS" or "STAT"
    uint32_t version;
    uint64_t layout;    // hash of the layout the bytes were taken from
    int64_t  p0;        // first position; of a state: 0
    int64_t  p1;        // position after the last
    uint8_t  reserved[32];
};
static_assert(sizeof(block_header) == 64, "the header keeps what follows aligned");

// One attention tensor: rows of `row` bytes, or, transposed, `n_embd` runs of `row`-byte elements.
struct row_part {
    ggml_tensor * tensor;
    int32_t       type;
    size_t        row;
    size_t        n_embd;      // 1 unless transposed
    size_t        per_token() const { return row * n_embd; }
};

// `count` pieces of one token's `row` bytes each, a `stride` apart on the device: tensors of the same kind that lie at
// equal distances, such as K of all layers, are one of these, and rows of all move in one copy.
struct row_plane {
    ggml_tensor tensor;   // from the first piece to the end of the last
    size_t      row;
    size_t      count;
    size_t      stride;
};

// A part of a saved block of rows: positions [first, last) out of the block at `data`.
struct row_span {
    const uint8_t * data;
    size_t          size;
    int64_t         first;
    int64_t         last;
};

// What is saved and loaded may still be on its way when a function returns, see transfer.h: `finish` waits for it.
class kv_state {
public:
    // `seq` must hold at least one token: the layout is read from what the library writes for it.
    kv_state(llama_context * ctx, llama_seq_id seq);

    memory_kind kind() const { return kind_; }
    bool        transposed() const { return v_trans; }
    uint64_t    layout() const { return layout_hash; }
    std::string describe() const { return description; }
    size_t      row_bytes() const { return bytes_per_row; }
    size_t      n_layers() const { return k_parts.size(); }

    int64_t n_rows(llama_seq_id seq) const;
    bool    ordered(llama_seq_id seq) const;

    size_t rows_size(int64_t p0, int64_t p1) const;
    void   save_rows(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size);
    void   load_rows(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans);

    size_t state_size(llama_seq_id seq) const;
    void   save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size);
    void   load_state(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size);

    void rewind(llama_seq_id seq, int64_t n);
    void clear(llama_seq_id seq);

    bool is_async() const { return copies->is_async(); }
    void finish() { copies->finish(); }

private:
    llama_context *          ctx;
    memory_kind              kind_ = memory_kind::whole;
    llama_kv_cache *         attn  = nullptr;
    llama_memory_recurrent * recr  = nullptr;

    bool                  v_trans       = false;
    bool                  has_ext       = false;
    size_t                bytes_per_row = 0;  // over all parts, extra positions included
    std::vector<row_part> k_parts;
    std::vector<row_part> v_parts;
    std::vector<row_plane> planes;  // in the order of a block's bytes

    std::unique_ptr<transfer> copies;

    std::vector<io_step> recurrent_steps;  // as written for one cell
    size_t               recurrent_bytes = 0;
    uint64_t             layout_hash     = 0;
    std::string          description;

    struct run {  // cells [cell, cell + count) hold positions [pos, pos + count)
        int64_t cell, pos, count;
    };
    std::vector<run> runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const;

    void discover_attention(llama_seq_id seq);
    void discover_recurrent(llama_seq_id seq);

    void check_seq(llama_seq_id seq) const;
    void check_rows() const;

    void append_rows(llama_seq_id seq, const std::vector<row_span> & spans);
    void claim_cells(llama_seq_id seq, const std::vector<row_span> & spans);
    void plan_planes(const std::vector<row_part> & parts);
    template <typename F>
    void each_region(const std::vector<run> & runs, int64_t p0, int64_t p1, int64_t first, int64_t last, const F & move);
    void put_header(uint8_t * out, const char * magic, int64_t p0, int64_t p1) const;
    block_header get_header(const uint8_t * data, size_t size, const char * magic) const;
};
