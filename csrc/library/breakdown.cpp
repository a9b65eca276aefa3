#include "library/breakdown.h"

#include "library/memory.h"

#include "llama-ext.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

namespace library {

static std::string place_of(ggml_backend_buffer_type_t buft) {
    auto * device  = ggml_backend_buft_get_device(buft);
    auto   is_host = device == nullptr || ggml_backend_buft_is_host(buft);  // a CPU also has buffers that are no host's
    return is_host || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ? "" : ggml_backend_dev_name(device);
}

std::map<std::string, std::array<size_t, 4>> breakdown(llama_context * ctx) {
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

std::vector<std::string> row_places(llama_context * ctx) {
    std::vector<std::string> found;
    const auto               parts = parts_of(ctx);
    if (parts.sets.size() == 1 && !parts.window) {
        const auto & cache = static_cast<const llama_kv_cache &>(*parts.sets[0].cache.memory());
        for (const uint32_t layer : cache.get_layer_ids()) {
            found.push_back(place_of(ggml_backend_buffer_get_type(cache.get_k_storage(layer)->buffer)));
        }
    }
    return found;
}

std::vector<std::string> layer_devices(const llama_model * model) {
    std::vector<std::string> found;
    for (int32_t layer = 0; layer < llama_model_n_layer(model) + llama_model_n_layer_nextn(model); ++layer) {
        found.push_back(ggml_backend_dev_name(model->dev_layer(layer)));
    }
    found.push_back(ggml_backend_dev_name(model->dev_output()));
    return found;
}

}  // namespace library
