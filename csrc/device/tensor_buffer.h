// Memory of a backend's buffer type, as one tensor of bytes.
#pragma once

#include "device/handles.h"

#include "ggml.h"

#include <cstdint>
#include <stdexcept>

struct tensor_buffer {
    buffer_handle buffer;
    ggml_tensor   bytes{};

    uint8_t * data() const { return static_cast<uint8_t *>(bytes.data); }
    size_t    size() const { return buffer != nullptr ? ggml_backend_buffer_get_size(buffer.get()) : 0; }
};

// The buffer of a tensor, or of the tensor that it is a view of.
ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor);

// `size` bytes of `tensor` from `offset` on, as a tensor of bytes.
ggml_tensor bytes_of(const ggml_tensor * tensor, size_t offset, size_t size);

// `size` bytes of zeros, since kernels may read masked rows; without memory null, or std::runtime_error.
tensor_buffer zeros_or_none(ggml_backend_buffer_type_t type, size_t size);
tensor_buffer allocate_zeros(ggml_backend_buffer_type_t type, size_t size);

// The host memory that is copied fastest to and from where `type` is.
ggml_backend_buffer_type_t host_type_beside(ggml_backend_buffer_type_t type);
