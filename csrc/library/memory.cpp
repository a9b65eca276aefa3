#include "library/memory.h"

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

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <typeinfo>

namespace library {

namespace {

// `memory` as a T; null unless that is its very class: one that derives from T may have caches that T does not know of.
template <typename T> T * exactly(llama_memory_t memory) {
    return typeid(*memory) == typeid(T) ? static_cast<T *>(memory) : nullptr;
}

row_set rows_in(llama_memory_t memory, bool keys_only = false) {
    return { cache(memory), keys_only };
}

// What the classes consist of.
memory_parts made_of(llama_memory_t memory) {
    memory_parts parts;
    if (auto * plain = exactly<llama_kv_cache>(memory)) {
        parts.sets = { rows_in(plain) };
    } else if (auto * latent = exactly<llama_kv_cache_dsa>(memory)) {
        parts.sets = { rows_in(latent->get_mla()), rows_in(latent->get_lid()) };
    } else if (auto * blocks = exactly<llama_kv_cache_msa>(memory)) {
        parts.sets = { rows_in(blocks->get_base()), rows_in(blocks->get_idx(), true) };
    } else if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        parts.sets      = { rows_in(hybrid->get_mem_attn()) };
        parts.recurrent = hybrid->get_mem_recr();
    } else if (auto * indexed = exactly<llama_memory_hybrid_idx>(memory)) {
        parts.sets      = { rows_in(indexed->get_mem_attn()) };
        parts.recurrent = indexed->get_mem_recr();
        if (indexed->get_mem_idx() != nullptr) {
            parts.sets.push_back(rows_in(indexed->get_mem_idx()));
        }
    } else if (auto * both = exactly<llama_memory_hybrid_iswa>(memory)) {
        parts           = made_of(both->get_mem_attn());
        parts.recurrent = both->get_mem_recr();
    } else if (auto * sliding = exactly<llama_kv_cache_iswa>(memory)) {
        parts.sets   = { rows_in(sliding->get_base()) };
        parts.window = cache(sliding->get_swa());
    } else if (auto * latent = exactly<llama_kv_cache_dsa_iswa>(memory)) {
        parts        = made_of(latent->get_dsa());
        parts.window = cache(latent->get_swa());
    } else if (auto * compressed = exactly<llama_kv_cache_dsv4>(memory)) {
        parts.window = cache(compressed->get_raw()->get_swa());
    } else {
        parts.recurrent = exactly<llama_memory_recurrent>(memory);  // has no rows
    }
    return parts;
}

// Records what a part writes.
class recorder : public llama_io_write_i {
public:
    std::vector<io_step> steps;

    void write(const void * src, size_t size) override {
        const auto * p = static_cast<const uint8_t *>(src);
        steps.push_back({ nullptr, 0, size, std::vector<uint8_t>(p, p + size) });
        total += size;
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        steps.push_back({ tensor, offset, size, {} });
        total += size;
    }
    size_t n_bytes() override { return total; }

private:
    size_t total = 0;
};

// Feeds a part.
class feeder : public llama_io_read_i {
public:
    feeder(const std::vector<uint8_t> & plain, const filler & fill) : plain(plain), fill(fill) {}

    void read(void * dst, size_t size) override {
        if (at + size > plain.size()) {
            throw std::runtime_error("llama.cpp asked for more state than was prepared");
        }
        std::memcpy(dst, plain.data() + at, size);
        at += size;
    }
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { fill(tensor, offset, size); }
    size_t n_bytes() override { return at; }

private:
    const std::vector<uint8_t> & plain;
    const filler &               fill;
    size_t                       at = 0;
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
    // Only a cache beside others may slide, with one position a cell except in drafts, which have text alone. With a stream
    // per sequence rows cannot be handed on; with --split-mode tensor only the library puts the parts of rows together.
    const bool is_unified = parts.sets.empty() ? parts.recurrent != nullptr : parts.sets[0].cache.is_unified();
    if (!is_unified || (parts.n_seen > 0) != bool(parts.window) ||
        (parts.window && parts.window.has_extra() && model.arch != LLM_ARCH_DFLASH) ||
        model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        parts.sets.clear();
        return parts;
    }
    parts.kind = parts.recurrent != nullptr || parts.window ? memory_kind::hybrid : memory_kind::attention;
    return parts;
}

int64_t first_seen(llama_context * ctx, int64_t n) {
    const llama_hparams & hparams = ctx->get_model().hparams;
    int64_t               first   = std::max(n - 1, int64_t(0));
    while (first > 0 && !llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, first - 1, n)) {
        --first;
    }
    return first;
}

void begin_anew(llama_memory_t recurrent, llama_seq_id seq) {
    static_cast<llama_memory_recurrent *>(recurrent)->set_rs_idx(seq, 0);
}

std::vector<io_step> written(llama_memory_t part, llama_seq_id seq) {
    recorder stream;
    part->state_write(stream, seq);
    return std::move(stream.steps);
}

void read(llama_memory_t part, llama_seq_id seq, const std::vector<uint8_t> & plain, const filler & fill) {
    feeder stream(plain, fill);
    part->state_read(stream, seq);
}

}  // namespace library
