#include "device/tensor_buffer.h"

#include "core/transfer.h"

tensor_buffer allocate_zeros(ggml_backend_buffer_type_t type, size_t size) {
    tensor_buffer made{ buffer_handle(ggml_backend_buft_alloc_buffer(type, size)) };
    if (made.buffer == nullptr) {
        throw std::runtime_error("no room for " + std::to_string(size) + " bytes in " + ggml_backend_buft_name(type));
    }
    ggml_backend_buffer_clear(made.buffer.get(), 0);
    made.bytes = bytes_of(made.buffer.get(), 0, made.size());
    return made;
}

ggml_backend_buffer_type_t host_type_beside(ggml_backend_buffer_type_t type) {
    ggml_backend_dev_t         device = ggml_backend_buft_get_device(type);
    ggml_backend_buffer_type_t host   = device != nullptr ? ggml_backend_dev_host_buffer_type(device) : nullptr;
    return host != nullptr ? host : ggml_backend_cpu_buffer_type();
}
