#include "selection/device_graph.h"

namespace {

constexpr size_t most_nodes = 32;

}  // namespace

device_graph::device_graph(llama_context * ctx, ggml_backend_buffer_type_t type)
    : memory(2 * most_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(most_nodes, false)),
      room(ggml_gallocr_new(type)) {
    ggml_backend_sched_t scheduler = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler) && backend == nullptr; ++i) {
        ggml_backend_t candidate = ggml_backend_sched_get_backend(scheduler, i);
        if (ggml_backend_supports_buft(candidate, type)) {
            backend = candidate;
        }
    }
    if (backend == nullptr || room == nullptr) {
        throw std::runtime_error(std::string("nothing computes in ") + ggml_backend_buft_name(type));
    }
}

ggml_tensor * device_graph::outside(ggml_context * ctx, ggml_type type, ggml_backend_buffer_t buffer, void * data,
                                    int64_t ne0, int64_t ne1) {
    ggml_tensor * made = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    made->buffer       = buffer;
    made->data         = data;
    return made;
}

ggml_cgraph * device_graph::build(const build_function & function) {
    result = nullptr;
    tensors.reset();
    tensors.reset(ggml_init({ memory.size(), memory.data(), true }));
    ggml_cgraph * graph = ggml_new_graph_custom(tensors.get(), most_nodes, false);
    result              = function(tensors.get());
    ggml_build_forward_expand(graph, result);
    return graph;
}

void device_graph::reserve(const build_function & function) {
    ggml_cgraph * graph = build(function);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!ggml_backend_supports_op(backend, node)) {
            throw std::runtime_error(std::string(ggml_backend_name(backend)) + " cannot compute " + ggml_op_desc(node) + " of " +
                                     ggml_type_name(node->src[0]->type));
        }
    }
    if (!ggml_gallocr_reserve(room.get(), graph)) {
        throw std::runtime_error(std::string("no room to choose rows in ") + ggml_backend_name(backend));
    }
}

void device_graph::run(const build_function & function) {
    ggml_cgraph * graph = build(function);
    if (!ggml_gallocr_alloc_graph(room.get(), graph) ||
        ggml_backend_graph_compute_async(backend, graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("rows could not be chosen");
    }
}

void device_graph::read(float * out, size_t n) {
    ggml_backend_tensor_get_async(backend, result, out, 0, n * sizeof(float));
    wait();
}
