#include "core/layout.h"

#include <algorithm>
#include <cstring>

namespace {

uint64_t fnv1a(const std::string & text) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char c : text) {
        hash = (hash ^ c) * 0x100000001b3ull;
    }
    return hash;
}

[[noreturn]] void refuse_order() {
    throw std::runtime_error("llama.cpp wrote its state in an order this extension cannot read");
}

// The step at index `at`; std::runtime_error if there is none.
const io_step & step_at(const std::vector<io_step> & steps, size_t at) {
    if (at >= steps.size()) {
        refuse_order();
    }
    return steps[at];
}

// The plain bytes of `step` as a value; std::runtime_error if they are not a T.
template <typename T> T value_of(const io_step & step) {
    if (step.tensor != nullptr || step.bytes.size() != sizeof(T)) {
        refuse_order();
    }
    T value;
    std::memcpy(&value, step.bytes.data(), sizeof(T));
    return value;
}

// Before the rows of a layer's K stand their type and their size.
constexpr size_t n_before_rows = 2;

// The steps that are written about a whole cache after the number of its layers, from step `at` on: nothing by version 3 of the
// format, by version 4 how K and V are rotated. How much it is follows from where the first rows are, so that no version
// has to be known, and a library with another version than its headers is read as it writes.
std::vector<uint32_t> cache_values(const std::vector<io_step> & steps, size_t at) {
    const auto is_of_rows = [](const io_step & step) { return step.tensor != nullptr; };
    const auto begin      = steps.begin() + static_cast<std::ptrdiff_t>(std::min(at, steps.size()));
    const auto rows       = std::find_if(begin, steps.end(), is_of_rows);
    const auto n_plain    = static_cast<size_t>(rows - begin);
    const auto n_of_layer = rows == steps.end() ? 0 : n_before_rows;  // a cache may have no layer
    if (n_plain < n_of_layer) {
        refuse_order();
    }
    std::vector<uint32_t> values;
    for (size_t i = 0; i < n_plain - n_of_layer; ++i) {
        values.push_back(value_of<uint32_t>(begin[static_cast<std::ptrdiff_t>(i)]));
    }
    return values;
}

row_layout rows_of(llama_context * ctx, const row_set & set, llama_seq_id seq) {
    const auto steps = library::written(set.cache.memory(), seq);
    row_layout layout;
    layout.has_ext = set.cache.has_extra();
    // After the number of streams come the number of cells, the cells, whether V is transposed, and the number of layers.
    const auto n_cells  = value_of<uint32_t>(step_at(steps, 1));
    size_t     at       = 2 + n_cells * (layout.has_ext ? 4 : 3);
    layout.v_transposed = value_of<uint32_t>(step_at(steps, at++)) != 0;
    const auto n_layers = value_of<uint32_t>(step_at(steps, at++));
    layout.values       = cache_values(steps, at);
    at += layout.values.size();
    while (at < steps.size()) {
        const bool is_k = layout.k.size() < n_layers;
        row_tensor part{ value_of<int32_t>(step_at(steps, at++)), 0, 1 };
        if (!is_k && layout.v_transposed) {
            part.row    = value_of<uint32_t>(step_at(steps, at++));
            part.n_embd = value_of<uint32_t>(step_at(steps, at++));
        } else {
            part.row = value_of<uint64_t>(step_at(steps, at++));
        }
        const ggml_tensor * tensor = step_at(steps, at).tensor;
        if (tensor == nullptr || tensor->type != part.type) {
            refuse_order();
        }
        part.parts = library::parts_of_rows(ctx, tensor);
        size_t sum = 0;
        while (at < steps.size() && steps[at].tensor != nullptr) {
            sum += steps[at++].size;
        }
        if (sum != n_cells * part.per_token()) {
            throw std::runtime_error("llama.cpp wrote attention rows of an unknown shape");
        }
        if (is_k || !set.keys_only) {
            (is_k ? layout.k : layout.v).push_back(part);
        }
    }
    return layout;
}

std::vector<io_step> recurrent_of(llama_memory_t memory, llama_seq_id seq) {
    std::vector<io_step> steps = library::written(memory, seq);
    if (steps.size() < 3 || value_of<uint32_t>(steps[0]) != 1) {
        throw std::runtime_error("llama.cpp wrote a recurrent state of an unknown shape");
    }
    return steps;
}

// Fingerprints of files contain these texts: they must stay as they are, the word "whole" for opaque memories included.
std::string text_of(const row_layout & rows) {
    std::string text = std::string(" ext=") + (rows.has_ext ? "1" : "0") + " transposed=" + (rows.v_transposed ? "1" : "0");
    for (const auto * tensors : { &rows.k, &rows.v }) {
        text += tensors == &rows.k ? " k=" : " v=";
        for (const row_tensor & part : *tensors) {
            text += std::to_string(part.type) + ":" + std::to_string(part.row) + "x" + std::to_string(part.n_embd) + ",";
        }
    }
    text += rows.values.empty() ? "" : " values=";
    for (const uint32_t value : rows.values) {
        text += std::to_string(value) + ",";
    }
    return text;
}

std::string text_of(const std::vector<io_step> & recurrent) {
    std::string text = " state=";
    for (const io_step & step : recurrent) {
        text += step.tensor != nullptr ? std::to_string(step.size) + "," : "";
    }
    return text;
}

}  // namespace

std::vector<copy_region> regions_of(const std::vector<io_step> & steps, const tensor_parts & parts) {
    std::vector<copy_region> regions;
    size_t                   place = 0;
    for (const io_step & step : steps) {
        if (step.tensor == nullptr || step.size == 0) {
            continue;
        }
        for (const row_part & part : parts.at(step.tensor)) {
            const size_t offset = step.offset / step.size * part.tensor->nb[1] + part.offset;
            regions.push_back({ part.tensor, offset, part.size, part.count, part.size, part.pitch, place + part.place });
        }
        place += step.size;
    }
    return regions;
}

void row_layout::add(const row_layout & set) {
    has_ext      = has_ext || set.has_ext;
    v_transposed = v_transposed || set.v_transposed;
    k.insert(k.end(), set.k.begin(), set.k.end());
    v.insert(v.end(), set.v.begin(), set.v.end());
}

size_t row_layout::row_bytes() const {
    size_t sum = ext_bytes();
    for (const auto * tensors : { &k, &v }) {
        for (const row_tensor & part : *tensors) {
            sum += part.per_token();
        }
    }
    return sum;
}

std::vector<ggml_tensor *> memory_layout::tensors() const {
    std::vector<ggml_tensor *> found;
    for (const auto * tensors : { &rows.k, &rows.v, &window.k, &window.v }) {
        for (const row_tensor & each : *tensors) {
            for (const row_part & part : each.parts) {
                found.push_back(part.tensor);
            }
        }
    }
    for (const copy_region & region : regions_of(recurrent, parts)) {
        found.push_back(region.tensor);
    }
    return found;
}

memory_layout layout_of(llama_context * ctx, const memory_parts & parts, llama_seq_id seq) {
    const char *  names[] = { "attention", "hybrid", "whole" };
    memory_layout layout;
    layout.text = names[static_cast<int>(parts.kind)] + (parts.sets.empty() ? text_of(layout.rows) : "");
    llama_synchronize(ctx);
    for (const row_set & set : parts.sets) {
        if (llama_memory_seq_pos_max(set.cache.memory(), seq) < 0) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " is empty: evaluate one token first");
        }
        const row_layout rows = rows_of(ctx, set, seq);
        layout.text += text_of(rows);
        layout.rows.add(rows);
    }
    const auto rope   = llama_model_rope_type(llama_get_model(ctx));
    layout.rows.is_2d = layout.rows.has_ext && (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE);
    if (parts.kind == memory_kind::hybrid && parts.window) {
        layout.window = rows_of(ctx, { parts.window }, seq);
        layout.text += " window=" + std::to_string(parts.n_seen) + "/" + std::to_string(parts.window.size()) +
                       text_of(layout.window);
    }
    if (parts.kind == memory_kind::hybrid && parts.recurrent != nullptr) {
        layout.recurrent = recurrent_of(parts.recurrent, seq);
    }
    // Also in a memory that is saved whole: its states are wiped.
    for (const io_step & step : parts.recurrent != nullptr ? library::written(parts.recurrent, seq) : layout.recurrent) {
        if (step.tensor != nullptr) {
            layout.parts[step.tensor] = library::parts_of_rows(ctx, step.tensor);
        }
    }
    layout.text += text_of(layout.recurrent);
    layout.hash = fnv1a(layout.text);
    return layout;
}
