#include "library/split.h"

#include "ggml-cpp.h"
#include "library/context.h"
#include "llama-model.h"

#include <map>
#include <stdexcept>

namespace library {

namespace {

// What ggml's books of a buffer on several devices begin with; no header has them.
struct books {
    std::vector<ggml_context_ptr>                             contexts;
    std::map<const ggml_tensor *, std::vector<ggml_tensor *>> tensors;  // of each, those of the devices
};

}  // namespace

std::vector<row_part> parts_of_rows(llama_context * ctx, const ggml_tensor * tensor) {
    tensor = tensor->view_src != nullptr ? tensor->view_src : tensor;
    if (!ggml_backend_buffer_is_meta(tensor->buffer)) {
        return { { const_cast<ggml_tensor *>(tensor), 0, tensor->nb[1], 1, 0, 0 } };
    }
    auto         data    = ctx->get_model().get_split_state_ud;
    const auto   split   = llama_meta_device_get_split_state(tensor, &data);
    const auto & devices = static_cast<const books *>(tensor->buffer->context)->tensors.at(tensor);
    std::vector<row_part> parts;
    if (split.axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED) {
        for (ggml_tensor * each : devices) {
            parts.push_back({ each, 0, tensor->nb[1], 1, 0, 0 });
        }
        return parts;
    }
    std::vector<size_t> used(devices.size());
    size_t              place = 0;
    for (size_t segment = 0; segment < split.n_segments; ++segment) {
        const auto   size  = [&](size_t i) { return ggml_row_size(tensor->type, split.ne[segment * devices.size() + i]); };
        const size_t count = split.nr[segment];
        size_t       pitch = 0;
        for (size_t i = 0; i < devices.size(); ++i) {
            pitch += size(i);
        }
        for (size_t i = 0, at = place; i < devices.size(); at += size(i++)) {
            if (size(i) > 0) {
                parts.push_back({ devices[i], used[i], size(i), count, pitch, at });
            }
            used[i] += count * size(i);
        }
        place += count * pitch;
    }
    if (split.axis != GGML_BACKEND_SPLIT_AXIS_0 || place != tensor->nb[1]) {
        throw std::runtime_error("llama.cpp splits its memory in a way this extension does not know");
    }
    return parts;
}

std::vector<ggml_backend_t> backends(llama_context * ctx) {
    std::vector<ggml_backend_t> found;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler(ctx)); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(scheduler(ctx), i);
        const bool     is_meta = ggml_backend_is_meta(backend);
        for (size_t j = 0; j < (is_meta ? ggml_backend_meta_n_backends(backend) : 1); ++j) {
            found.push_back(is_meta ? ggml_backend_meta_simple_backend(backend, j) : backend);
        }
    }
    return found;
}

}  // namespace library
