#include "core/layout.h"

#include <typeinfo>

namespace {

uint64_t fnv1a(const std::string & text) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char c : text) {
        hash = (hash ^ c) * 0x100000001b3ull;
    }
    return hash;
}

row_layout rows_of(const row_set & set, llama_seq_id seq) {
    recorder stream;
    set.cache->state_write(stream, seq);
    const auto & steps = stream.steps;
    row_layout   layout;
    layout.has_ext = set.cache->has_cell_ext();
    // After the number of streams come that of cells, these cells, whether V is transposed, and the number of layers.
    const auto n_cells  = value_of<uint32_t>(steps.at(1));
    size_t     at       = 2 + n_cells * (layout.has_ext ? 4 : 3);
    layout.v_transposed = value_of<uint32_t>(steps.at(at++)) != 0;
    const auto n_layers = value_of<uint32_t>(steps.at(at++));
    while (at < steps.size()) {
        const bool is_k = layout.k.size() < n_layers;
        row_tensor part{ nullptr, value_of<int32_t>(steps.at(at++)), 0, 1 };
        if (!is_k && layout.v_transposed) {
            part.row    = value_of<uint32_t>(steps.at(at++));
            part.n_embd = value_of<uint32_t>(steps.at(at++));
        } else {
            part.row = value_of<uint64_t>(steps.at(at++));
        }
        part.tensor = steps.at(at).tensor;
        size_t sum  = 0;
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

// `memory` as a T; null unless that is its very class: one that derives from T may have caches that T does not know of.
template <typename T> T * exactly(llama_memory_t memory) {
    return typeid(*memory) == typeid(T) ? static_cast<T *>(memory) : nullptr;
}

// What the classes consist of.
memory_parts made_of(llama_memory_t memory) {
    memory_parts parts;
    if (auto * plain = exactly<llama_kv_cache>(memory)) {
        parts.sets = { { plain } };
    } else if (auto * latent = exactly<llama_kv_cache_dsa>(memory)) {
        parts.sets = { { latent->get_mla() }, { latent->get_lid() } };
    } else if (auto * blocks = exactly<llama_kv_cache_msa>(memory)) {
        parts.sets = { { blocks->get_base() }, { blocks->get_idx(), true } };
    } else if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        parts.sets      = { { hybrid->get_mem_attn() } };
        parts.recurrent = hybrid->get_mem_recr();
    } else if (auto * indexed = exactly<llama_memory_hybrid_idx>(memory)) {
        parts.sets      = { { indexed->get_mem_attn() } };
        parts.recurrent = indexed->get_mem_recr();
        if (indexed->get_mem_idx() != nullptr) {
            parts.sets.push_back({ indexed->get_mem_idx() });
        }
    } else if (auto * both = exactly<llama_memory_hybrid_iswa>(memory)) {
        parts           = made_of(both->get_mem_attn());
        parts.recurrent = both->get_mem_recr();
    } else if (auto * sliding = exactly<llama_kv_cache_iswa>(memory)) {
        parts.sets   = { { sliding->get_base() } };
        parts.window = sliding->get_swa();
    } else if (auto * latent = exactly<llama_kv_cache_dsa_iswa>(memory)) {
        parts        = made_of(latent->get_dsa());
        parts.window = latent->get_swa();
    } else if (auto * compressed = exactly<llama_kv_cache_dsv4>(memory)) {
        parts.window = compressed->get_raw()->get_swa();
    } else {
        parts.recurrent = exactly<llama_memory_recurrent>(memory);  // has no rows
    }
    return parts;
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
    return text;
}

std::string text_of(const recurrent_layout & recurrent) {
    std::string text = " state=";
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
    if (memory == nullptr) {
        return {};
    }
    const llama_hparams & hparams = compat::hparams_of(ctx);
    memory_parts          parts   = made_of(memory);
    parts.type                    = typeid(*memory).name();  // its length comes first
    parts.type.erase(0, parts.type.find_first_not_of("0123456789"));
    parts.n_seen                  = hparams.swa_type != LLAMA_SWA_TYPE_NONE ? hparams.n_swa : 0;
    // Only a cache beside others may slide, with one position a cell except in drafts, which have text alone. With a stream
    // per sequence rows cannot be handed on; with --split-mode tensor only the library puts the parts of rows together.
    const bool is_unified = parts.sets.empty() ? parts.recurrent != nullptr : parts.sets[0].cache->get_n_stream() == 1;
    if (!is_unified || (parts.n_seen > 0) != (parts.window != nullptr) ||
        (parts.window != nullptr && parts.window->has_cell_ext() && llama_get_model(ctx)->arch != LLM_ARCH_DFLASH) ||
        llama_get_model(ctx)->split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        parts.sets.clear();
        return parts;
    }
    parts.kind = parts.recurrent != nullptr || parts.window != nullptr ? memory_kind::hybrid : memory_kind::attention;
    return parts;
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
    const char *  names[] = { "attention", "hybrid", "whole" };
    memory_layout layout;
    layout.text = names[static_cast<int>(parts.kind)] + (parts.sets.empty() ? text_of(layout.rows) : "");
    llama_synchronize(ctx);
    for (const row_set & set : parts.sets) {
        if (set.cache->seq_pos_max(seq) < 0) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " is empty: evaluate one token first");
        }
        const row_layout rows = rows_of(set, seq);
        layout.text += text_of(rows);
        layout.rows.add(rows);
    }
    const auto rope   = llama_model_rope_type(llama_get_model(ctx));
    layout.rows.is_2d = layout.rows.has_ext && (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE);
    if (parts.kind == memory_kind::hybrid && parts.window != nullptr) {
        layout.window = rows_of({ parts.window }, seq);
        layout.text += " window=" + std::to_string(parts.n_seen) + "/" + std::to_string(parts.window->get_size()) +
                       text_of(layout.window);
    }
    if (parts.kind == memory_kind::hybrid && parts.recurrent != nullptr) {
        layout.recurrent = recurrent_of(*parts.recurrent, seq);
    }
    layout.text += text_of(layout.recurrent);
    layout.hash = fnv1a(layout.text);
    return layout;
}
