// What pyctl needs of contexts and devices beyond the public functions of llama.cpp and ggml.
#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <stdexcept>

namespace library {

// std::runtime_error unless the loaded library has the version and the sizes that this was compiled with.
void check();

// The backend with which `ctx` computes on `device`; null for none.
ggml_backend_t compute_backend(llama_context * ctx, ggml_backend_dev_t device);

// Calls `callback`, null for none, for the nodes of all evaluations of `ctx` from now on. If it does not `last`, only for
// those of the next one, and only where that uses the last graph again.
void on_node(llama_context * ctx, ggml_backend_sched_eval_callback callback, void * data, bool lasts = true);

// Sets bytes of `tensor` to zero, unless its backend cannot.
void set_to_zero(ggml_tensor * tensor, size_t offset, size_t size);

// The event as the device's own library has it.
void * device_event(ggml_backend_event_t event);

}  // namespace library
