// Makes the attention of unmodified llama.cpp read and write rows outside of its cache.
//
// The library calls its evaluation callback for each node before it computes the node. Nodes that write new rows into
// the cache get the place of our rows and their positions; nodes that read the cache get our rows and a causal mask.
// Nodes are found by the cache tensors that they view. They get their own sources back after the evaluation, since the
// library reuses graphs. If the next evaluation needs no change, the nodes keep our sources and the callback is not
// called, so that a device sees the same graph. The owner of the rows determines the place of each layer's rows.
#pragma once

#include "core/layout.h"
#include "device/tensor_buffer.h"

#include <functional>
#include <stdexcept>
#include <unordered_map>

class redirect {
public:
    // Where the rows of one layer lie, from position 0 on; `stops` if `after` is to be called when its attention is done.
    struct place {
        ggml_tensor * k;
        ggml_tensor * v;
        bool          stops;
    };

    // Installs itself in `ctx`, whose cache `rows` describes, for at most `n_rows` rows of each layer at `places`, a multiple
    // of `padding`, and batches of `n_tokens`. `after` gets the number of a layer. All must outlive this, and the context's
    // evaluations with it. std::runtime_error without memory.
    redirect(llama_context * ctx, const row_layout & rows, transfer & copies, int64_t n_rows, int64_t n_tokens,
             std::vector<place> places, std::function<void(size_t)> after);
    ~redirect();

    redirect(const redirect &)             = delete;
    redirect & operator=(const redirect &) = delete;

    // The library computes attention over so many rows at a time.
    static constexpr int64_t padding = 256;

    // The next evaluation is that of positions [first, last).
    void begin(int64_t first, int64_t last);

    // Ends the evaluation. Returns the error; empty if each layer has read and written its rows once.
    std::string end();

    // Bytes on the device.
    size_t device_bytes() const { return mask_buffer.size() + index_buffer.size() + output_buffer.size(); }

    // The number of evaluations without callbacks so far.
    uint64_t repeated() const { return n_repeated; }

private:
    // A node that was changed, and what it had before.
    struct changed_node {
        ggml_tensor * node;
        ggml_tensor   before;
        void *        data;  // now
        ggml_tensor * source;
    };

    // What one layer's attention reads in this evaluation.
    struct view {
        ggml_tensor k{}, v{};
        int         n_written = 0;  // of K and V together
        int         n_read    = 0;
    };

    static bool called(ggml_tensor * node, bool ask, void * self);

    void undo(ggml_tensor * node);
    std::string settle();
    bool before(ggml_tensor * node);
    void write(ggml_tensor * node);
    bool read(ggml_tensor * node);
    bool fail(const std::string & what);
    void follow(ggml_tensor * node);
    bool give_room(ggml_tensor * node, const ggml_tensor & before);
    void remember(ggml_tensor * node, const ggml_tensor & before);
    void open_output(const row_layout & rows, ggml_backend_buffer_type_t type);
    void open_mask();
    void fill_mask(bool visible, int64_t row, int64_t n, int64_t column, int64_t width, int64_t shift);
    void move_mask(int64_t first, int64_t n);

    llama_context *                                   ctx;
    transfer &                                        copies;
    int64_t                                           n_rows, n_tokens;
    std::function<void(size_t)>                       after;
    size_t                                            n_layers;
    std::unordered_map<const ggml_tensor *, size_t>   k_of, v_of;  // the library's tensor -> layer
    std::unordered_map<const ggml_tensor *, size_t>   stop_at;     // node -> layer
    const ggml_tensor *                               moved = nullptr;  // the last attention whose output is ours
    tensor_buffer                                     mask_buffer, index_buffer, pattern_buffer, output_buffer;
    ggml_tensor                                       mask{}, index{};  // what nodes get, once for all
    std::vector<int64_t>                              positions;        // of the tokens of the batch
    std::vector<int64_t>                              mask_at;          // of each row of the mask: see move_mask
    std::vector<view>                                 views;
    std::vector<place>                                places;
    std::vector<changed_node>                         changed;

    // Nodes that were changed by an earlier evaluation and may still be so. While `is_left`, these are all that it takes:
    // the last evaluation was asked about, without a stop, and had so many tokens and so many rows to read.
    std::unordered_map<const ggml_tensor *, changed_node> left;
    bool                                              is_left = false, has_stopped = false, was_asked = false;
    bool                                              repeating = false;  // the one that runs is not to be asked about
    int64_t                                           n_left = 0, n_left_rows = 0;
    int32_t                                           n_reused   = 0;  // graphs that the library had used again before
    uint64_t                                          n_repeated = 0;
    int64_t                                           first = 0, last = 0;
    bool                                              active = false;
    std::string                                       failure;
};
