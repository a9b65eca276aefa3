#include "library/memory.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <typeinfo>
#include <utility>

namespace library {

namespace {

// `memory` as a T; null unless that is its very class: one that derives from T may have caches that T lacks.
template <typename T> T * exactly(llama_memory_t memory) {
    return typeid(*memory) == typeid(T) ? static_cast<T *>(memory) : nullptr;
}

// The parts of the known classes; none for another class.
memory_parts made_of(llama_memory_t memory) {
    memory_parts parts;
    if (auto * plain = exactly<llama_kv_cache>(memory)) {
        parts.sets = { { plain } };
    } else if (auto * latent = exactly<llama_kv_cache_dsa>(memory)) {
        parts.sets = { { latent->get_mla() }, { latent->get_lid() } };
    } else if (auto * blocks = exactly<llama_kv_cache_msa>(memory)) {
        parts.sets = { { blocks->get_base() }, { blocks->get_idx(), true } };
    } else if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        parts = { { { hybrid->get_mem_attn() } }, hybrid->get_mem_recr() };
    } else if (auto * indexed = exactly<llama_memory_hybrid_idx>(memory)) {
        parts = { { { indexed->get_mem_attn() } }, indexed->get_mem_recr() };
        if (indexed->get_mem_idx() != nullptr) {
            parts.sets.push_back({ indexed->get_mem_idx() });
        }
    } else if (auto * both = exactly<llama_memory_hybrid_iswa>(memory)) {
        parts           = made_of(both->get_mem_attn());
        parts.recurrent = both->get_mem_recr();
    } else if (auto * sliding = exactly<llama_kv_cache_iswa>(memory)) {
        parts = { { { sliding->get_base() } }, nullptr, sliding->get_swa() };
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

// Records where tensor data is that a part writes or reads, and the plain bytes that it writes; those that it reads are `plain`.
struct recorder : llama_io_write_i, llama_io_read_i {
    std::vector<io_step> steps;
    std::vector<uint8_t> plain;
    size_t               n_plain = 0, n_tensors = 0;

    void write(const void * src, size_t size) override {
        const auto * bytes = static_cast<const uint8_t *>(src);
        steps.push_back({ nullptr, 0, size, { bytes, bytes + size } });
        n_plain += size;
    }
    void read(void * dst, size_t size) override {
        if (size > plain.size() - n_plain) {
            throw std::runtime_error("llama.cpp asked for more state than was prepared");
        }
        std::memcpy(dst, plain.data() + n_plain, size);
        n_plain += size;
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        steps.push_back({ tensor, offset, size, {} });
        n_tensors += size;
    }
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { write_tensor(tensor, offset, size); }
    size_t n_bytes() override { return n_plain + n_tensors; }
};

// The first members of ggml's record of a buffer on several devices; no header has it.
struct buffer_record {
    std::vector<ggml_context_ptr>                             contexts;
    std::map<const ggml_tensor *, std::vector<ggml_tensor *>> tensors;  // of each, the devices'
};

}  // namespace

memory_parts parts_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (memory == nullptr) {
        return {};
    }
    const llama_model & model = ctx->get_model();
    memory_parts        parts = made_of(memory);
    parts.type                = typeid(*memory).name();  // its length comes first
    parts.type.erase(0, parts.type.find_first_not_of("0123456789"));
    parts.n_seen = model.hparams.swa_type != LLAMA_SWA_TYPE_NONE ? model.hparams.n_swa : 0;
    // Only one of several caches may slide, with one position a cell except in drafts, which have only text. With a stream
    // per sequence rows cannot be handed on.
    const bool is_unified = parts.sets.empty() ? parts.recurrent != nullptr : parts.sets[0].cache.memory()->get_n_stream() == 1;
    if (!is_unified || (parts.n_seen > 0) != bool(parts.window) ||
        (parts.window && parts.window.has_extra() && model.arch != LLM_ARCH_DFLASH)) {
        parts.sets.clear();
        return parts;
    }
    parts.kind = parts.recurrent != nullptr || parts.window ? memory_kind::hybrid : memory_kind::attention;
    return parts;
}

bool sees(llama_context * ctx, int64_t n, int64_t p) {
    const llama_hparams & hparams = ctx->get_model().hparams;
    return !llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, p, n);
}

void begin_anew(llama_memory_t recurrent, llama_seq_id seq) {
    static_cast<llama_memory_recurrent *>(recurrent)->set_rs_idx(seq, 0);
}

std::vector<io_step> written(llama_memory_t part, llama_seq_id seq) {
    recorder stream;
    part->state_write(stream, seq);
    return std::move(stream.steps);
}

std::vector<io_step> read(llama_memory_t part, llama_seq_id seq, std::vector<uint8_t> plain) {
    recorder stream;
    stream.plain = std::move(plain);
    part->state_read(stream, seq);
    return std::move(stream.steps);
}

std::vector<row_part> parts_of_rows(llama_context * ctx, const ggml_tensor * tensor) {
    tensor = tensor->view_src != nullptr ? tensor->view_src : tensor;
    if (!ggml_backend_buffer_is_meta(tensor->buffer)) {
        return { { const_cast<ggml_tensor *>(tensor), 0, tensor->nb[1], 1, 0, 0 } };
    }
    auto         data    = ctx->get_model().get_split_state_ud;
    const auto   split   = llama_meta_device_get_split_state(tensor, &data);
    const auto & devices = static_cast<const buffer_record *>(tensor->buffer->context)->tensors.at(tensor);
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
        throw std::runtime_error("llama.cpp splits its memory in a way this extension cannot read");
    }
    return parts;
}

}  // namespace library
