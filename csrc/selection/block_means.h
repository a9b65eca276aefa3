// Means of the keys of few positions each, one set for every layer with attention, and what queries make of them: which
// chunks of positions a layer would look at most. Means are computed when they are first needed, a chunk at a time.
#pragma once

#include "pool/row_stages.h"
#include "selection/device_graph.h"

// Positions that are chosen together.
constexpr int64_t chunk_rows = 64;

class block_means {
public:
    // Of `block` positions each, which divides a chunk, for layers of `n_rows` rows and batches of `n_tokens`; `device`
    // is where keys lie that are resident. All must outlive this. std::runtime_error where the device cannot compute them,
    // or without memory.
    block_means(llama_context * ctx, transfer & copies, const std::vector<stored_layer> & layers, int64_t n_rows, int64_t block,
                int64_t n_tokens, ggml_backend_buffer_type_t device);

    // Means of positions from n on are void.
    void truncate(int64_t n);

    // How much chunks [first, last), which are whole, get of the attention of layer `index` that its node `attention` is
    // to compute: of a chunk the largest over queries and heads, after a softmax over these chunks with the best block of
    // each. Queries have been computed; nothing else is on its way on the device when it returns.
    const std::vector<float> & shares(size_t index, const ggml_tensor & attention, int64_t first, int64_t last);

    // Bytes on the device.
    size_t bytes() const;

    // Where it computes.
    device_graph & on_device() { return graph; }

private:
    struct summary {
        tensor_buffer means;
        int64_t       width;         // elements of a row
        int64_t       n_chunks = 0;  // that have means
    };

    void          extend(size_t index, int64_t n_chunks);
    ggml_tensor * mean_of(ggml_context * ctx, size_t index, const tensor_buffer & from, size_t offset, int64_t first, int64_t n);
    ggml_tensor * share_of(ggml_context * ctx, size_t index, const ggml_tensor & queries, int64_t n_heads, float scale,
                           int64_t first, int64_t n);
    void          reserve(llama_context * ctx, int64_t n_tokens);

    transfer &                        copies;
    const std::vector<stored_layer> & all;
    int64_t                           n_rows, block;
    std::vector<summary>              summaries;  // of all layers
    tensor_buffer                     landing;    // for keys that lie in host memory, on their way to a mean
    device_graph                      graph;
    std::vector<float>                found;
};
