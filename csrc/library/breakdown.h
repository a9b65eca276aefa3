// Memory of a context and devices of layers, also of a model that is loaded without weights.
#pragma once

#include "library/memory.h"

#include "llama-ext.h"
#include "llama-model.h"

#include <array>
#include <map>

namespace library {

// The device where `buft` lies, "" for the host.
inline std::string place_of(ggml_backend_buffer_type_t buft) {
    auto * device  = ggml_backend_buft_get_device(buft);
    auto   is_host = device == nullptr || ggml_backend_buft_is_host(buft);  // a CPU also has buffers that are not the host's
    return is_host || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ? "" : ggml_backend_dev_name(device);
}

// Bytes of weights, K and V, states, and compute buffers by place.
inline std::map<std::string, std::array<size_t, 4>> breakdown(llama_context * ctx) {
    std::map<std::string, std::array<size_t, 4>> found;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        auto & [weights, rows, states, compute] = found[place_of(buft)];
        weights += bytes.model;
        rows += bytes.context;
        compute += bytes.compute;
    }
    if (const auto * recurrent = parts_of(ctx).recurrent) {
        for (const auto & [buft, n_bytes] : recurrent->memory_breakdown()) {
            auto & [weights, rows, states, compute] = found[place_of(buft)];
            states += n_bytes;
            rows -= n_bytes;
        }
    }
    return found;
}

// Places of the layers with K and V, in order; none unless one cache has all of them.
inline std::vector<std::string> row_places(llama_context * ctx) {
    std::vector<std::string> found;
    const auto               parts = parts_of(ctx);
    if (parts.sets.size() == 1 && !parts.window) {
        const llama_kv_cache * cache = parts.sets[0].cache.memory();
        for (const uint32_t layer : cache->get_layer_ids()) {
            found.push_back(place_of(ggml_backend_buffer_get_type(cache->get_k_storage(layer)->buffer)));
        }
    }
    return found;
}

// Names of the devices of all layers, the output last.
inline std::vector<std::string> layer_devices(const llama_model * model) {
    std::vector<std::string> found;
    for (int32_t layer = 0; layer < llama_model_n_layer(model) + llama_model_n_layer_nextn(model); ++layer) {
        found.push_back(ggml_backend_dev_name(model->dev_layer(layer)));
    }
    found.push_back(ggml_backend_dev_name(model->dev_output()));
    return found;
}

}  // namespace library
