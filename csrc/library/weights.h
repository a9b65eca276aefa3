// Weights of a loaded model in the mapping of its file.
#pragma once

#include "llama-model.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

namespace library {

// Takes [data, data + size), of a file, out of this process; false for pages that are locked in memory (--mlock).
inline bool release_pages(void * data, size_t size) {
    // Else a huge page of the file would bring them back with the first read of their neighbours. Systems without such
    // pages refuse it.
    madvise(data, size, MADV_NOHUGEPAGE);
    return madvise(data, size, MADV_DONTNEED) == 0;
}

// Takes the pages of the model's file that no tensor uses in place out of this process; returns their bytes. llama.cpp maps
// the file with all pages, and unmaps those before the first such tensor and after the last. Between them are the weights of
// which a device or a repacked buffer has a copy, and those that are not loaded. The pages stay in the page cache of the
// system: one that is read after all comes back from there.
inline size_t release_copied(const llama_model * model) {
    using range = std::pair<size_t, size_t>;
    std::vector<range> used;
    std::set<range>    buffers;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        ggml_backend_buffer_t buffer = tensor->buffer;
        if (buffer == nullptr || std::strcmp(ggml_backend_buffer_name(buffer), "CPU_Mapped") != 0) {
            continue;
        }
        const auto data = reinterpret_cast<size_t>(tensor->data);
        const auto base = reinterpret_cast<size_t>(ggml_backend_buffer_get_base(buffer));
        used.emplace_back(data, data + ggml_nbytes(tensor));
        buffers.emplace(base, base + ggml_backend_buffer_get_size(buffer));
    }
    std::sort(used.begin(), used.end());
    const auto page     = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t     end      = 0;  // of the tensors so far
    size_t     released = 0;
    for (const auto & tensor : used) {
        const size_t first      = (end + page - 1) / page * page;
        const size_t last       = tensor.first / page * page;
        const auto   has_both   = [&](const range & buffer) { return buffer.first <= first && last <= buffer.second; };
        const bool   is_in_file = first < last && std::any_of(buffers.begin(), buffers.end(), has_both);
        if (is_in_file && release_pages(reinterpret_cast<void *>(first), last - first)) {
            released += last - first;
        }
        end = std::max(end, tensor.second);
    }
    return released;
}

}  // namespace library
