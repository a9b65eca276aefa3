// Rows of one sequence in buffers of our own, for contexts that are longer than the library's cache or than the device has
// room for. The library keeps the last row and its last batch's, to find where the sequence ends; its attention
// reads and writes here (redirect.h). The rows of a *resident* layer lie on the device; the others' lie in host
// memory and pass through a stage on the device in each evaluation (row_stages.h).
//
// The row of a position has one place. A held row stays there when the sequence is cut, and blocks any other row of
// that position: a caller must release it before it writes there.
#pragma once

#include "core/row_memory.h"
#include "pool/redirect.h"
#include "pool/row_stages.h"

struct store_settings {
    int64_t             n_ctx;     // the most rows
    std::vector<size_t> resident;  // layers, counted as blocks have them
    size_t              n_stages;  // one at least is made; layers that share one wait for each other
};

class row_store : public row_memory {
public:
    // The memory of `cache` and `copies` must outlive this; `hash` is the whole layout's. There is one sequence in the
    // context, and nothing of it is kept. std::runtime_error where attention cannot be redirected, or without memory.
    row_store(llama_context * ctx, library::cache cache, const row_layout & layout, uint64_t hash, transfer & copies,
              const store_settings & settings);
    ~row_store() override { copies.finish(); }

    // As llama_decode, for tokens that follow the rows, which may not be evaluated otherwise. std::invalid_argument or
    // out_of_cells before anything is changed; std::runtime_error if the rows were not written, or not here.
    int decode(const llama_batch & batch);

    int64_t end_of(llama_seq_id) const override { return n_rows; }
    void    load_checked(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) override;
    void    truncate(llama_seq_id seq, int64_t n) override;
    int64_t n_free() const override { return n_ctx - n_rows - n_held(); }
    void    reserve(int64_t n, bool in_parts) override;

    held_rows::handle hold(llama_seq_id seq, int64_t p0, int64_t p1) override;
    int64_t           n_held() const override { return n_only_held; }

    // See row_stages.h.
    uint64_t streamed_bytes() const { return stages->streamed_bytes(); }
    double   waited_ms() const { return stages->waited_ms(); }

private:
    struct host_copy;

    int64_t position_after(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const override;
    bool    is_vacant(int64_t cell) const override { return cell >= n_rows; }
    void    copy_out(const std::vector<cell_run> & runs, int64_t p0, int64_t p1, uint8_t * out) override;

    void check_context() const;
    void check_batch(const llama_batch & batch) const;
    void check_end(int64_t p0, int64_t p1) const;
    void check_text(const row_span & span) const;
    void check_room(int64_t p0, int64_t p1) const;
    void copy_in(const row_span & span, std::vector<host_copy> & on_host);
    static void copy_on_host(const std::vector<host_copy> & parts);
    void open(const store_settings & settings);
    void move_end(int64_t n);
    void place_last();
    void remember_exts(int64_t p0, int64_t p1);
    void failed();

    template <typename F> void each_plane(int64_t p0, int64_t p1, const F & function);

    llama_context *                ctx;
    library::cache                 cache;
    int64_t                        n_ctx;
    std::vector<stored_layer>      layers;
    std::unique_ptr<row_stages>    stages;
    std::vector<cell_extra>        exts;  // of each position, where the model has them
    std::unique_ptr<redirect>      attention;
    int64_t                        n_rows = 0, n_next = 0;  // now; when the evaluation that runs has succeeded
};
