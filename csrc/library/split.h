// Tensors in parts on several devices, as K, V and states are with --split-mode tensor.
#pragma once

#include "llama.h"

#include <vector>

// A part of each row of a tensor: `count` pieces of `size` bytes. They lie one after the other in the row of `tensor`, which
// is on one device, from `offset` on; in the whole row from `place` on, `pitch` apart. What is
// the same on several devices has a part for each.
struct row_part {
    ggml_tensor * tensor;
    size_t        offset, size, count, pitch, place;
};

namespace library {

// All parts of the rows of a tensor of the memory of `ctx`, one of a whole tensor. std::runtime_error if it is divided in
// another way.
std::vector<row_part> parts_of_rows(llama_context * ctx, const ggml_tensor * tensor);

// The backends with which `ctx` computes, each for one device.
std::vector<ggml_backend_t> backends(llama_context * ctx);

}  // namespace library
