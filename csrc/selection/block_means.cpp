#include "selection/block_means.h"

#include <algorithm>

namespace {

constexpr int64_t piece_chunks = 64;  // whose means are computed at a time

int64_t width_of(const row_tensor & part) {
    const auto type = static_cast<ggml_type>(part.type);
    return static_cast<int64_t>(part.row / ggml_type_size(type)) * ggml_blck_size(type);
}

// A byte for each number: exact enough to choose by, and devices multiply it with any number of queries as it is.
constexpr ggml_type mean_type = GGML_TYPE_Q8_0;

void check_heads(const llama_hparams & hparams) {
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (hparams.n_embd_head_k(il) % static_cast<uint32_t>(ggml_blck_size(mean_type)) != 0) {
            throw std::runtime_error("rows cannot be chosen for heads of " + std::to_string(hparams.n_embd_head_k(il)) +
                                     " elements");
        }
    }
}

}  // namespace

block_means::block_means(llama_context * ctx, transfer & copies, const std::vector<stored_layer> & layers, int64_t n_rows,
                         int64_t block, int64_t n_tokens, ggml_backend_buffer_type_t device)
    : copies(copies), all(layers), n_rows(n_rows), block(block), graph(ctx, device) {
    check_heads(compat::hparams_of(ctx));
    size_t landed = 0;
    for (const stored_layer & layer : all) {
        const row_tensor & keys  = layer.k_of_cache;
        const int64_t      width = width_of(keys);
        const size_t       size  = ggml_row_size(mean_type, width) * static_cast<size_t>(n_rows / block);
        summaries.push_back({ allocate_zeros(device, size + row_slack), width });
        landed = std::max(landed, layer.resident ? 0 : keys.row * static_cast<size_t>(piece_chunks * chunk_rows));
    }
    if (landed > 0) {
        landing = allocate_zeros(device, landed + row_slack);
    }
    reserve(ctx, n_tokens);
}

// Room for the largest of both computations. How keys are divided into heads is not known yet: it is taken as one.
void block_means::reserve(llama_context * ctx, int64_t n_tokens) {
    const llama_hparams & hparams = compat::hparams_of(ctx);
    int64_t               n_heads = 1;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        n_heads = std::max<int64_t>(n_heads, hparams.n_head(il));
    }
    for (size_t i = 0; i < all.size(); ++i) {
        const int64_t n = std::min(piece_chunks, n_rows / chunk_rows);
        graph.reserve([&](ggml_context * tensors) {
            return mean_of(tensors, i, all[i].resident ? all[i].k : landing, 0, 0, n);
        });
        graph.reserve([&](ggml_context * tensors) {
            ggml_tensor * queries = device_graph::outside(tensors, GGML_TYPE_F32, summaries[i].means.buffer.get(),
                                                          summaries[i].means.data(), summaries[i].width, n_tokens * n_heads);
            const ggml_tensor shaped = *ggml_view_3d(tensors, queries, summaries[i].width, n_tokens, n_heads,
                                                     queries->nb[1] * static_cast<size_t>(n_heads), queries->nb[1], 0);
            return share_of(tensors, i, shaped, 1, 1.0f, 0, n_rows / chunk_rows);
        });
    }
}

size_t block_means::bytes() const {
    size_t sum = landing.size() + graph.bytes();
    for (const summary & own : summaries) {
        sum += own.means.size();
    }
    return sum;
}

void block_means::truncate(int64_t n) {
    for (summary & own : summaries) {
        own.n_chunks = std::min(own.n_chunks, n / chunk_rows);
    }
}

// The means of n chunks from `first` on, whose keys lie in `from` behind `offset`. Each element is computed on its own,
// so that it does not matter how many are computed at a time.
ggml_tensor * block_means::mean_of(ggml_context * ctx, size_t index, const tensor_buffer & from, size_t offset, int64_t first,
                                   int64_t n) {
    summary &     own     = summaries[index];
    const auto    type    = static_cast<ggml_type>(all[index].k_of_cache.type);
    const int64_t n_means = n * chunk_rows / block;
    ggml_tensor * keys =
        device_graph::outside(ctx, type, from.buffer.get(), from.data() + offset, own.width, n * chunk_rows);
    ggml_tensor * mean =
        ggml_pool_2d(ctx, ggml_cast(ctx, keys, GGML_TYPE_F32), GGML_OP_POOL_AVG, 1, static_cast<int>(block), 1,
                     static_cast<int>(block), 0, 0);
    const size_t  row = ggml_row_size(mean_type, own.width);
    ggml_tensor * to  = device_graph::outside(ctx, mean_type, own.means.buffer.get(),
                                              own.means.data() + row * static_cast<size_t>(first * chunk_rows / block), own.width,
                                              n_means);
    return ggml_cpy(ctx, mean, to);
}

void block_means::extend(size_t index, int64_t n_chunks) {
    summary &          own   = summaries[index];
    const stored_layer & layer = all[index];
    while (own.n_chunks < n_chunks) {
        const int64_t         n      = std::min(n_chunks - own.n_chunks, piece_chunks);
        const size_t          chunk  = layer.k_of_cache.row * static_cast<size_t>(chunk_rows);
        const tensor_buffer * from   = &layer.k;
        size_t                offset = chunk * static_cast<size_t>(own.n_chunks);
        if (!layer.resident) {
            graph.wait();  // what landed before has been used
            copies.load({ &landing.bytes, 0, chunk * static_cast<size_t>(n) }, layer.k.data() + offset);
            copies.load_end();
            from   = &landing;
            offset = 0;
        }
        graph.run([&](ggml_context * ctx) { return mean_of(ctx, index, *from, offset, own.n_chunks, n); });
        own.n_chunks += n;
    }
}

// Of n chunks from `first` on; `queries` have the shape that attention reads: elements, tokens, heads.
ggml_tensor * block_means::share_of(ggml_context * ctx, size_t index, const ggml_tensor & queries, int64_t n_heads, float scale,
                                    int64_t first, int64_t n) {
    const summary & own       = summaries[index];
    const int64_t   width     = queries.ne[0], n_tokens = queries.ne[1], per_head = queries.ne[2] / n_heads;
    const int64_t   per_chunk = chunk_rows / block;
    const size_t    row       = ggml_row_size(mean_type, own.width);

    ggml_tensor * asked = ggml_new_tensor(ctx, queries.type, GGML_MAX_DIMS, queries.ne);
    asked->buffer       = queries.view_src != nullptr ? queries.view_src->buffer : queries.buffer;
    asked->data         = queries.data;
    std::copy(queries.nb, queries.nb + GGML_MAX_DIMS, asked->nb);
    // The heads that share keys become columns of one matrix product.
    ggml_tensor * grouped = ggml_view_4d(ctx, asked, width, per_head, n_tokens, n_heads, queries.nb[2], queries.nb[1],
                                         queries.nb[2] * static_cast<size_t>(per_head), 0);
    ggml_tensor * columns = ggml_cont_3d(ctx, grouped, width, per_head * n_tokens, n_heads);
    ggml_tensor * means   = device_graph::outside(ctx, mean_type, own.means.buffer.get(), own.means.data(), own.width,
                                                  n_rows / block);
    ggml_tensor * keys    = ggml_view_3d(ctx, means, width, n * per_chunk, n_heads, row, ggml_row_size(mean_type, width),
                                         row * static_cast<size_t>(first * per_chunk));
    ggml_tensor * weights = ggml_mul_mat(ctx, keys, columns);
    ggml_prec_set_acc(weights, GGML_PREC_F32);
    if (per_chunk > 1) {
        const int pieces = static_cast<int>(per_chunk);
        weights          = ggml_pool_2d(ctx, weights, GGML_OP_POOL_MAX, pieces, 1, pieces, 1, 0, 0);
    }
    const int n_columns = static_cast<int>(per_head * n_tokens * n_heads);
    weights             = ggml_soft_max_ext(ctx, ggml_reshape_2d(ctx, weights, n, n_columns), nullptr, scale, 0.0f);
    return ggml_pool_2d(ctx, weights, GGML_OP_POOL_MAX, 1, n_columns, 1, n_columns, 0, 0);
}

const std::vector<float> & block_means::shares(size_t index, const ggml_tensor & attention, int64_t first, int64_t last) {
    const ggml_tensor & queries = *attention.src[0];
    const int64_t       n_heads = attention.src[1]->ne[2];
    if (queries.type != GGML_TYPE_F32 || queries.ne[3] != 1 || queries.ne[2] % n_heads != 0 ||
        queries.ne[0] * n_heads != summaries[index].width) {
        throw std::runtime_error("queries of layer " + std::to_string(index) + " have another shape");
    }
    float scale = 0.0f;
    std::memcpy(&scale, attention.op_params, sizeof(scale));
    extend(index, last);
    graph.run([&](ggml_context * ctx) { return share_of(ctx, index, queries, n_heads, scale, first, last - first); });
    found.resize(static_cast<size_t>(last - first));
    graph.read(found.data(), found.size());
    return found;
}
