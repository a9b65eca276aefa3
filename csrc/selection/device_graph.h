// Small computations of our own where some tensors lie, on the stream that computes for the library, between two of its
// nodes. They are built anew each time; room for the largest is taken once.
#pragma once

#include "compat.h"

#include <cstdint>
#include <functional>
#include <vector>

class device_graph {
public:
    // Returns the last node of what is to be computed; tensors that lie elsewhere are made by `outside`.
    using build_function = std::function<ggml_tensor *(ggml_context *)>;

    // For tensors in buffers of `type`, which a backend of `ctx` computes with; std::runtime_error if none does.
    device_graph(llama_context * ctx, ggml_backend_buffer_type_t type);

    // Room for what `build` returns, of which nothing is computed. std::runtime_error if the device cannot compute it,
    // or without memory.
    void reserve(const build_function & build);

    // Starts to compute what `build` returns. What the library computes after this sees it. std::runtime_error.
    void run(const build_function & build);

    // Waits until what was started is complete.
    void wait() { ggml_backend_synchronize(backend); }

    // What the last `run` has computed, which has `n` numbers. Waits for it.
    void read(float * out, size_t n);

    // Bytes on the device.
    size_t bytes() const { return ggml_gallocr_get_buffer_size(room.get(), 0); }

    // A tensor of two dimensions at `data` in `buffer`.
    static ggml_tensor * outside(ggml_context * ctx, ggml_type type, ggml_backend_buffer_t buffer, void * data, int64_t ne0,
                                 int64_t ne1);

private:
    ggml_cgraph * build(const build_function & function);

    using context_handle = std::unique_ptr<ggml_context, freed_by<ggml_free>>;
    using room_handle    = std::unique_ptr<ggml_gallocr, freed_by<ggml_gallocr_free>>;

    ggml_backend_t       backend = nullptr;
    std::vector<uint8_t> memory;  // of the tensors, without their data
    context_handle       tensors;
    ggml_tensor *        result = nullptr;
    room_handle          room;
};
