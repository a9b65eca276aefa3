// Rows of one sequence in buffers of our own, for contexts that are longer than the library's cache or than the device has
// room for. The library keeps the last row and those of its last batch, to know where the sequence ends; its attention
// reads and writes here (redirect.h).
//
// The rows of a *resident* layer lie on the device. Those of a *streamed* layer lie in host memory and pass through a
// *stage* on the device for each evaluation: while one layer computes, the next one that has to is copied, also the
// first ones of the next evaluation. New rows go from the stage to the host when their layer is done.
#pragma once

#include "ggml_handles.h"
#include "layout.h"
#include "redirect.h"
#include "row_memory.h"
#include "transfer.h"

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class llama_kv_cache;

struct store_settings {
    int64_t             n_ctx;     // the most rows
    std::vector<size_t> resident;  // layers, counted as blocks have them
    size_t              n_stages;  // at least 1; layers that share one wait for each other
};

class row_store : public row_memory {
public:
    // `cache` and `copies` must outlive this; `hash` is that of the whole memory's layout. There is one sequence in the
    // context, and nothing of it is kept. std::runtime_error where attention cannot be redirected, or without memory.
    row_store(llama_context * ctx, llama_kv_cache & cache, const row_layout & layout, uint64_t hash, transfer & copies,
              const store_settings & settings);
    ~row_store() override;

    // As llama_decode, for tokens that follow the rows, which may not be evaluated otherwise. std::invalid_argument or
    // out_of_cells before anything is changed; std::runtime_error if the rows were not written, or not here.
    int decode(const llama_batch & batch);

    int64_t end_of(llama_seq_id) const override { return n_rows; }
    size_t  size(int64_t p0, int64_t p1) const override;
    void    save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) override;
    void    load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) override;
    void    truncate(llama_seq_id seq, int64_t n) override;
    llama_pos cut(llama_seq_id seq, int64_t n) override;
    int64_t n_free() const override { return n_ctx - n_rows; }
    void    reserve(int64_t n, bool in_parts) override;

    struct layer_info {
        std::string name;  // of the library's tensor of its keys
        size_t      k_row, v_row;
        bool        resident;
    };
    std::vector<layer_info> info() const;

    size_t device_bytes() const;  // of resident layers, stages and the mask
    size_t stage_bytes() const;
    size_t host_bytes() const;

    uint64_t streamed_bytes() const { return n_streamed; }  // copied into stages so far
    double   waited_ms() const { return waited; }           // by evaluations, for these copies

    // Bytes per second that reach a stage, measured now; 0 without one. The stage is filled anew afterwards.
    double copy_rate();

private:
    // A layer's rows: `k` and `v` lie on the device, or the host copies at `host_k` and `host_v`.
    struct layer {
        row_tensor    k_of_cache, v_of_cache;
        bool          resident;
        buffer_handle k_buffer, v_buffer;
        ggml_tensor   k{}, v{};
        uint8_t *     host_k = nullptr;
        uint8_t *     host_v = nullptr;
    };

    // The first `n` rows of streamed layer `holds` are there, when what `loaded` stands for is copied.
    struct stage {
        buffer_handle         k_buffer, v_buffer;
        ggml_tensor           k{}, v{};
        size_t                holds  = 0;
        int64_t               n      = 0;
        copy_progress::ticket loaded = 0;
    };

    // Host bytes that go from one place to another.
    struct host_copy {
        uint8_t *       to;
        const uint8_t * from;
        size_t          size;
    };

    void          check_context() const;
    void          check_batch(const llama_batch & batch) const;
    void          check_spans(int64_t p0, const std::vector<row_span> & spans) const;
    void          open(const store_settings & settings);
    void          place_last();
    void          remember_exts(int64_t p0, int64_t p1);
    layer &       streamed_layer(size_t i) { return layers[streamed[i]]; }
    stage &       stage_of(size_t i) { return stages[i % stages.size()]; }
    void          fill(stage & stage, int64_t n);
    void          wait(stage & stage);
    void          prepare_stages();
    void          layer_done(size_t index);
    void          failed();
    void          rows_are_home();

    template <typename F> void each_plane(const F & function);

    static void copy_on_host(std::vector<host_copy> parts);

    llama_context *                ctx;
    llama_kv_cache &               cache;
    row_layout                     layout;
    size_t                         row_bytes;
    uint64_t                       hash;
    transfer &                     copies;
    int64_t                        n_ctx, capacity;
    std::vector<layer>             layers;
    std::vector<size_t>            streamed;  // numbers of layers, in order
    std::vector<stage>             stages;
    std::vector<redirect::place>   places;
    std::vector<llama_kv_cell_ext> exts;  // of each position, where the model has them
    std::unique_ptr<redirect>      attention;
    int64_t                        n_rows = 0, n_next = 0;  // now; when the evaluation that runs has succeeded
    copy_progress::ticket          home       = 0;          // new rows of streamed layers are in host memory
    uint64_t                       n_streamed = 0;
    double                         waited     = 0.0;
};
