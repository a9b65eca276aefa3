#include "core/layout.h"

#include <cxxabi.h>

#include <cstdlib>
#include <typeinfo>

namespace {

uint64_t fnv1a(const std::string & text) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char c : text) {
        hash = (hash ^ c) * 0x100000001b3ull;
    }
    return hash;
}

// Reads the steps of a sequence's attention rows one after the other.
class step_cursor {
public:
    explicit step_cursor(const std::vector<io_step> & steps) : steps(steps) {}

    bool done() const { return at >= steps.size(); }
    void skip(size_t n) { at += n; }

    template <typename T> T next() { return value_of<T>(steps.at(at++)); }

    // Passes the data of one tensor, which must have `expected` bytes.
    ggml_tensor * next_tensor(size_t expected) {
        ggml_tensor * tensor = steps.at(at).tensor;
        size_t        sum    = 0;
        while (!done() && steps[at].tensor != nullptr) {
            sum += steps[at++].size;
        }
        if (sum != expected) {
            throw std::runtime_error("llama.cpp wrote attention rows of an unknown shape");
        }
        return tensor;
    }

private:
    const std::vector<io_step> & steps;
    size_t                       at = 0;
};

row_layout rows_of(const llama_kv_cache & cache, llama_seq_id seq) {
    recorder stream;
    cache.state_write(stream, seq);
    row_layout  layout;
    step_cursor steps(stream.steps);

    layout.has_ext = cache.has_cell_ext();
    steps.skip(1);  // the number of streams
    const auto n_cells = steps.next<uint32_t>();
    steps.skip(n_cells * (layout.has_ext ? 4 : 3));
    layout.v_transposed = steps.next<uint32_t>() != 0;
    const auto n_layers = steps.next<uint32_t>();
    for (uint32_t i = 0; i < n_layers; ++i) {
        row_tensor part{ nullptr, steps.next<int32_t>(), 0, 1 };
        part.row    = steps.next<uint64_t>();
        part.tensor = steps.next_tensor(n_cells * part.row);
        layout.k.push_back(part);
    }
    while (!steps.done()) {
        row_tensor part{ nullptr, steps.next<int32_t>(), 0, 1 };
        if (layout.v_transposed) {
            part.row    = steps.next<uint32_t>();
            part.n_embd = steps.next<uint32_t>();
        } else {
            part.row = steps.next<uint64_t>();
        }
        part.tensor = steps.next_tensor(n_cells * part.per_token());
        layout.v.push_back(part);
    }
    return layout;
}

recurrent_layout recurrent_of(const llama_memory_recurrent & memory, llama_seq_id seq) {
    recorder stream;
    memory.state_write(stream, seq);
    recurrent_layout layout;
    layout.steps = std::move(stream.steps);
    if (layout.steps.size() < 3 || value_of<uint32_t>(layout.steps[0]) != 1) {
        throw std::runtime_error("llama.cpp wrote a recurrent state of an unknown shape");
    }
    for (const io_step & step : layout.steps) {
        layout.n_bytes += step.tensor != nullptr ? step.size : 0;
    }
    return layout;
}

std::string class_name(const llama_memory_i & memory) {
    int          status = 0;
    char *       text   = abi::__cxa_demangle(typeid(memory).name(), nullptr, nullptr, &status);
    std::string  name   = status == 0 ? text : typeid(memory).name();
    std::free(text);
    return name;
}

// The cache of a memory whose layers slide; null where its class is not known.
const llama_kv_cache * sliding_cache(llama_memory_t memory) {
    if (typeid(*memory) == typeid(llama_kv_cache_iswa)) {
        return static_cast<llama_kv_cache_iswa *>(memory)->get_swa();
    }
    if (typeid(*memory) == typeid(llama_kv_cache_dsa_iswa)) {
        return static_cast<llama_kv_cache_dsa_iswa *>(memory)->get_swa();
    }
    if (typeid(*memory) == typeid(llama_kv_cache_dsv4)) {
        return static_cast<llama_kv_cache_dsv4 *>(memory)->get_raw()->get_swa();
    }
    if (typeid(*memory) == typeid(llama_memory_hybrid_iswa)) {
        return static_cast<llama_memory_hybrid_iswa *>(memory)->get_mem_attn()->get_swa();
    }
    return nullptr;
}

sliding_window window_of(llama_context * ctx, llama_memory_t memory) {
    const llama_hparams & hparams = compat::hparams_of(ctx);
    if (hparams.swa_type == LLAMA_SWA_TYPE_NONE) {
        return {};
    }
    const llama_kv_cache * cache = sliding_cache(memory);
    return { hparams.n_swa, cache != nullptr ? cache->get_size() : 0, hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED };
}

// Fingerprints of files contain this text: it must stay as it is, the word "whole" for opaque memories included.
std::string text_of(memory_kind kind, const row_layout & rows, const recurrent_layout & recurrent) {
    const char * names[] = { "attention", "hybrid", "whole" };
    std::string  text    = std::string(names[static_cast<int>(kind)]) + " ext=" + (rows.has_ext ? "1" : "0") +
                       " transposed=" + (rows.v_transposed ? "1" : "0");
    for (const auto * tensors : { &rows.k, &rows.v }) {
        text += tensors == &rows.k ? " k=" : " v=";
        for (const row_tensor & part : *tensors) {
            text += std::to_string(part.type) + ":" + std::to_string(part.row) + "x" + std::to_string(part.n_embd) + ",";
        }
    }
    text += " state=";
    for (const io_step & step : recurrent.steps) {
        if (step.tensor != nullptr) {
            text += std::to_string(step.size) + ",";
        }
    }
    return text;
}

}  // namespace

memory_parts parts_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    memory_parts   parts;
    if (memory == nullptr) {
        return parts;
    }
    parts.type   = class_name(*memory);
    parts.window = window_of(ctx, memory);
    // By exact type: a class derived from one of these has caches that its base does not know of. A plain cache that
    // slides saves less than it holds. With one stream per sequence, rows cannot be handed from one sequence to another,
    // as attention_rows does. With --split-mode tensor each row and each state has parts on several devices, which only
    // the library puts together.
    llama_kv_cache *         attention = nullptr;
    llama_memory_recurrent * recurrent = nullptr;
    if (typeid(*memory) == typeid(llama_memory_hybrid)) {
        auto * hybrid = static_cast<llama_memory_hybrid *>(memory);
        attention     = hybrid->get_mem_attn();
        recurrent     = hybrid->get_mem_recr();
    } else if (typeid(*memory) == typeid(llama_kv_cache)) {
        attention = static_cast<llama_kv_cache *>(memory);
    }
    const bool is_split = llama_get_model(ctx)->split_mode() == LLAMA_SPLIT_MODE_TENSOR;
    if (attention == nullptr || attention->get_n_stream() != 1 || parts.window.size > 0 || is_split) {
        return parts;
    }
    parts.kind      = recurrent != nullptr ? memory_kind::hybrid : memory_kind::attention;
    parts.attention = attention;
    parts.recurrent = recurrent;
    return parts;
}

llama_memory_recurrent * recurrent_memory_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

size_t row_layout::ext_bytes() const {
    return has_ext ? sizeof(llama_kv_cell_ext) : 0;
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

std::vector<copy_region> recurrent_layout::regions() const {
    return regions_of(steps);
}

std::vector<ggml_tensor *> memory_layout::tensors() const {
    std::vector<ggml_tensor *> found;
    for (const auto * tensors : { &rows.k, &rows.v }) {
        for (const row_tensor & part : *tensors) {
            found.push_back(part.tensor);
        }
    }
    for (const io_step & step : recurrent.steps) {
        if (step.tensor != nullptr) {
            found.push_back(step.tensor);
        }
    }
    return found;
}

memory_layout layout_of(llama_context * ctx, const memory_parts & parts, llama_seq_id seq) {
    memory_layout layout;
    if (parts.attention != nullptr) {
        if (parts.attention->seq_pos_max(seq) < 0) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " is empty: evaluate one token first");
        }
        llama_synchronize(ctx);
        layout.rows       = rows_of(*parts.attention, seq);
        const auto rope   = llama_model_rope_type(llama_get_model(ctx));
        layout.rows.is_2d = layout.rows.has_ext && (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE);
    }
    if (parts.recurrent != nullptr) {
        layout.recurrent = recurrent_of(*parts.recurrent, seq);
    }
    layout.text = text_of(parts.kind, layout.rows, layout.recurrent);
    layout.hash = fnv1a(layout.text);
    return layout;
}
