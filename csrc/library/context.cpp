#include "library/context.h"

#include "ggml-backend-impl.h"
#include "llama-context.h"

#include <stdexcept>
#include <string>

namespace library {

void check() {
    const auto text = [](const std::string & version, size_t n_bytes, size_t n_seqs) {
        return "ggml " + version + ", tensors of " + std::to_string(n_bytes) + " bytes, " + std::to_string(n_seqs) + " sequences";
    };
    constexpr size_t  object = 32;  // ggml's own header of a tensor
    const std::string built  = text(PYCTL_GGML_VERSION, sizeof(ggml_tensor) + object, LLAMA_MAX_SEQ);
    const std::string loaded = text(ggml_version(), ggml_tensor_overhead(), llama_max_parallel_sequences());
    if (built != loaded) {
        throw std::runtime_error("pyctl's extension was built for " + built + ", but " + loaded + " is loaded");
    }
}

ggml_backend_t compute_backend(llama_context * ctx, ggml_backend_dev_t device) {
    ggml_backend_sched_t scheduler = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(scheduler, i);
        if (ggml_backend_get_device(backend) == device) {
            return backend;
        }
    }
    return nullptr;
}

void on_node(llama_context * ctx, ggml_backend_sched_eval_callback callback, void * data, bool lasts) {
    if (lasts) {  // the context hands the callback in its parameters to the scheduler with each new graph
        auto & params            = const_cast<llama_cparams &>(ctx->get_cparams());
        params.cb_eval           = callback;
        params.cb_eval_user_data = data;
    }
    ggml_backend_sched_set_eval_callback(ctx->get_sched(), callback, data);
}

void set_to_zero(ggml_tensor * tensor, size_t offset, size_t size) {
    ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    if (buffer->iface.memset_tensor != nullptr) {
        ggml_backend_tensor_memset(tensor, 0, offset, size);
    }
}

void * device_event(ggml_backend_event_t event) {
    return event->context;
}

}  // namespace library
