#include "device/tensor_buffer.h"

#include <stdexcept>
#include <string>

namespace {

ggml_tensor bytes_at(ggml_backend_buffer_t buffer, void * base, size_t offset, size_t size) {
    ggml_tensor bytes{};
    bytes.type   = GGML_TYPE_I8;
    bytes.buffer = buffer;
    bytes.data   = static_cast<uint8_t *>(base) + offset;
    bytes.ne[0]  = static_cast<int64_t>(size);
    bytes.nb[0]  = 1;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        bytes.ne[i] = 1;
        bytes.nb[i] = size;
    }
    return bytes;
}

}  // namespace

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

ggml_tensor bytes_of(const ggml_tensor * tensor, size_t offset, size_t size) {
    return bytes_at(buffer_of(tensor), tensor->data, offset, size);
}

tensor_buffer zeros_or_none(ggml_backend_buffer_type_t type, size_t size) {
    tensor_buffer made{ buffer_handle(ggml_backend_buft_alloc_buffer(type, size)) };
    if (made.buffer != nullptr) {
        ggml_backend_buffer_clear(made.buffer.get(), 0);
        made.bytes = bytes_at(made.buffer.get(), ggml_backend_buffer_get_base(made.buffer.get()), 0, made.size());
    }
    return made;
}

tensor_buffer allocate_zeros(ggml_backend_buffer_type_t type, size_t size) {
    tensor_buffer made = zeros_or_none(type, size);
    if (made.buffer == nullptr) {
        throw std::runtime_error("no room for " + std::to_string(size) + " bytes in " + ggml_backend_buft_name(type));
    }
    return made;
}

ggml_backend_buffer_type_t host_type_beside(ggml_backend_buffer_type_t type) {
    ggml_backend_dev_t         device = ggml_backend_buft_get_device(type);
    ggml_backend_buffer_type_t host   = device != nullptr ? ggml_backend_dev_host_buffer_type(device) : nullptr;
    return host != nullptr ? host : ggml_backend_cpu_buffer_type();
}
