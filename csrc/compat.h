// Everything of llama.cpp and ggml that the extension relies on: no other file includes their headers or names what is
// private there. The compiler checks the shapes below, the loader that every function exists, and `check_library`, when
// the module is imported, what only the loaded library can tell. docs/native.md says how to move to another release.
#pragma once

// -- public ------------------------------------------------------------------------------------------------------------

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

// -- private -----------------------------------------------------------------------------------------------------------

#include "ggml-backend-impl.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-io.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

// -- what is assumed ---------------------------------------------------------------------------------------------------

namespace compat {

template <typename A, typename B> constexpr bool same = std::is_same_v<A, B>;

// Bytes of these are in files.
static_assert(sizeof(llama_kv_cell_ext) == 12 && std::is_trivially_copyable_v<llama_kv_cell_ext> &&
                  offsetof(llama_kv_cell_ext, x) == 0 && offsetof(llama_kv_cell_ext, y) == 4 &&
                  offsetof(llama_kv_cell_ext, tok) == 8,
              "further positions are part of the file format, see core/block.h");
static_assert(sizeof(llama_pos) == 4 && sizeof(llama_token) == 4 && sizeof(llama_seq_id) == 4, "see core/block.h");

// A sequence is written and read through these: layout, sequence_state and row_store know the order of the steps.
static_assert(same<decltype(&llama_io_write_i::write), void (llama_io_write_i::*)(const void *, size_t)> &&
              same<decltype(&llama_io_write_i::write_tensor), void (llama_io_write_i::*)(ggml_tensor *, size_t, size_t)> &&
              same<decltype(&llama_io_read_i::read), void (llama_io_read_i::*)(void *, size_t)> &&
              same<decltype(&llama_io_read_i::read_tensor), void (llama_io_read_i::*)(ggml_tensor *, size_t, size_t)>);

// Cells are found and taken as the library itself does it; its books of one stream are the cache's own, not a copy.
static_assert(same<decltype(&llama_kv_cache::find_slot),
                   llama_kv_cache::slot_info (llama_kv_cache::*)(const llama_ubatch &, bool) const> &&
              same<decltype(&llama_kv_cache::apply_ubatch),
                   void (llama_kv_cache::*)(const llama_kv_cache::slot_info &, const llama_ubatch &)> &&
              same<decltype(&llama_kv_cache::get_cells), const llama_kv_cells & (llama_kv_cache::*)(llama_seq_id) const>);

// The scheduler gets its callback from the parameters, which are the context's own.
static_assert(same<decltype(&llama_context::get_cparams), const llama_cparams & (llama_context::*)() const> &&
              same<decltype(llama_cparams::cb_eval), ggml_backend_sched_eval_callback>);

// The graph that a context evaluated last has no public name. An explicit instantiation may name what is private.
template <typename Tag, typename Tag::type member> struct reveal {
    friend typename Tag::type member_of(Tag) { return member; }
};
struct last_result {
    using type = llm_graph_result * (llama_context::*)();
    friend type member_of(last_result);
};
template struct reveal<last_result, &llama_context::get_gf_res_prev>;

inline llm_graph_result * result_of(llama_context * ctx) {
    return (ctx->*member_of(last_result{}))();
}

// The books of the one stream of `cache`.
inline llama_kv_cells & cells_of(llama_kv_cache & cache) {
    return const_cast<llama_kv_cells &>(cache.get_cells(0));
}

inline const llama_hparams & hparams_of(llama_context * ctx) {
    return ctx->get_model().hparams;
}

// The library hands its callback to the scheduler with each new graph; the last one may be used again before. Null for none.
inline void set_eval_callback(llama_context * ctx, ggml_backend_sched_eval_callback callback, void * data) {
    auto & params            = const_cast<llama_cparams &>(ctx->get_cparams());
    params.cb_eval           = callback;
    params.cb_eval_user_data = data;
    ggml_backend_sched_set_eval_callback(ctx->get_sched(), callback, data);
}

// std::runtime_error unless the loaded library has the sizes that this was compiled with.
inline void check_library() {
    const auto check = [](const char * name, const std::string & built, const std::string & loaded) {
        if (built != loaded) {
            throw std::runtime_error(std::string("pyctl's extension was built for ") + name + " " + built + ", but " + loaded +
                                     " is loaded: reinstall llama-cpp-python and pyctl");
        }
    };
    constexpr size_t object = 32;  // ggml's own header of a tensor
    check("ggml", PYCTL_GGML_VERSION, ggml_version());
    check("tensors of", std::to_string(sizeof(ggml_tensor) + object), std::to_string(ggml_tensor_overhead()));
    check("sequences up to", std::to_string(LLAMA_MAX_SEQ), std::to_string(llama_max_parallel_sequences()));
}

}  // namespace compat

// -- handles as owners -------------------------------------------------------------------------------------------------

template <auto free_function> struct freed_by {
    template <typename T> void operator()(T * handle) const { free_function(handle); }
};

using backend_handle = std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>>;
using event_handle   = std::unique_ptr<ggml_backend_event, freed_by<ggml_backend_event_free>>;
using buffer_handle  = std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>>;
