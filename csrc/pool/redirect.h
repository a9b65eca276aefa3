// Makes the attention of unmodified llama.cpp read and write rows outside of its cache.
//
// The library calls its evaluation callback for each node before it computes the node. Nodes that write new rows into
// the cache get the place of our rows and their positions; nodes that read the cache get our rows and a causal mask.
// Nodes are found by the cache tensors that they view. They get their own sources back after the evaluation, since the
// library reuses graphs. The owner of the rows determines the place of each layer's rows.
#pragma once

#include "core/layout.h"
#include "device/tensor_buffer.h"

#include <array>
#include <functional>
#include <stdexcept>
#include <unordered_map>

class redirect {
public:
    // Where the rows of one layer lie, K and V, from position 0 on; `stops` if `after` is to be called when its attention
    // is done.
    struct place {
        std::array<const ggml_tensor *, 2> rows;
        bool                               stops;
    };

    // Installs itself in `ctx`, whose cache `rows` describes, for at most `n_rows` rows of each layer at `places`, a multiple
    // of `padding`, and batches of `n_tokens`. `after` gets the number of a layer. All must outlive this, and the context's
    // evaluations with it. std::runtime_error without memory.
    redirect(llama_context * ctx, const row_layout & rows, transfer & copies, int64_t n_rows, int64_t n_tokens,
             const std::vector<place> & places, std::function<void(size_t)> after);
    ~redirect();

    redirect(const redirect &)             = delete;
    redirect & operator=(const redirect &) = delete;

    // The library computes attention over so many rows at a time.
    static constexpr int64_t padding = 256;

    // The next evaluation is of positions [first, last).
    void begin(int64_t first, int64_t last);

    // Ends the evaluation. Returns the error; empty if each layer has read and written its rows once.
    std::string end();

private:
    // A node before it was changed, and now.
    struct changed_node {
        ggml_tensor   before;
        void *        data;
        ggml_tensor * source;
    };

    // A layer, and the rows that its attention reads in this evaluation.
    struct layer {
        bool                       stops;
        std::array<ggml_tensor, 2> views{};
        int                        n_written = 0;  // of K and V together
        int                        n_read    = 0;
    };

    // K or V of a layer.
    struct part {
        size_t              layer;
        const ggml_tensor * rows;
    };

    static bool called(ggml_tensor * node, bool ask, void * self);

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

    llama_context *                               ctx;
    transfer &                                    copies;
    int64_t                                       n_rows, n_tokens;
    std::function<void(size_t)>                   after;
    std::vector<layer>                            layers;
    std::unordered_map<const ggml_tensor *, part> part_of;          // by the library's own tensor
    const ggml_tensor *                           moved = nullptr;  // the last attention whose output is ours
    tensor_buffer                                 mask_buffer, index_buffer, pattern_buffer, output_buffer;
    ggml_tensor                                   mask{}, index{};  // tensors that nodes get, once for all
    std::vector<int64_t>                          positions;        // of the tokens of the batch
    std::vector<int64_t>                          mask_at;          // of each row of the mask: see move_mask

    std::unordered_map<ggml_tensor *, changed_node> changed;  // nodes, by the evaluation that runs
    int64_t     first = 0, last = 0;  // positions of that, none if that is none
    size_t      stopped = 0;          // the layer after whose attention it stopped last
    std::string failure;
};
