// Functions of contexts, tensors and events beyond the public ones of llama.cpp and ggml.
#pragma once

#include "ggml-backend-impl.h"
#include "llama-context.h"

namespace library {

// As many sequences as contexts may have.
constexpr size_t n_sequences = LLAMA_MAX_SEQ;

inline ggml_backend_sched_t scheduler(llama_context * ctx) {
    return ctx->get_sched();
}

// The backend with which `ctx` computes on `device`, perhaps on others as well; null for none.
inline ggml_backend_t backend_of(llama_context * ctx, ggml_backend_dev_t device) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler(ctx)); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(scheduler(ctx), i);
        const bool     is_meta = ggml_backend_is_meta(backend);
        for (size_t j = 0; j < (is_meta ? ggml_backend_meta_n_backends(backend) : 1); ++j) {
            ggml_backend_t each = is_meta ? ggml_backend_meta_simple_backend(backend, j) : backend;
            if (ggml_backend_get_device(each) == device) {
                return each;
            }
        }
    }
    return nullptr;
}

// Calls `callback`, null for none, for the nodes of all evaluations of `ctx` from now on.
inline void on_node(llama_context * ctx, ggml_backend_sched_eval_callback callback, void * data) {
    auto & params            = const_cast<llama_cparams &>(ctx->get_cparams());  // the scheduler gets them with each new graph
    params.cb_eval           = callback;
    params.cb_eval_user_data = data;
    ggml_backend_sched_set_eval_callback(scheduler(ctx), callback, data);
}

// Has evaluations of `ctx` keep the states of recurrent cells after each of their last 1 + `n` tokens, at most as many as the
// cells have room for. A graph that is used again keeps what it was made for, and only those of as many tokens are.
inline void keep_states(llama_context * ctx, uint32_t n) {
    const_cast<llama_cparams &>(ctx->get_cparams()).n_rs_seq = n;  // of the parameters, graphs alone read it
}

// Whether ggml_backend_tensor_memset can be called for tensors in `buffer`.
inline bool can_be_set(ggml_backend_buffer_t buffer) {
    return buffer->iface.memset_tensor != nullptr;
}

// The event as the device's own library has it.
inline void * device_event(ggml_backend_event_t event) {
    return event->context;
}

}  // namespace library
