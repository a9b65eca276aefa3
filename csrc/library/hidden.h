// Hidden rows of a context, only for `_drafts`: those that enter a layer, or where `layer` is negative leave the last one.
#pragma once

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

namespace library {

// The last graph's result of a context has no public name. An explicit instantiation may name private members.
llm_graph_result * last_result(llama_context * ctx);
template <auto member> struct reveal {
    friend llm_graph_result * last_result(llama_context * ctx) { return (ctx->*member)(); }
};
template struct reveal<&llama_context::get_gf_res_prev>;

// Values of a row.
inline size_t hidden_width(llama_context * ctx, int32_t layer) {
    return layer < 0 ? llama_model_n_embd_out(llama_get_model(ctx)) : ctx->get_model().hparams.n_embd;
}

// The rows of the last graph, null for none.
inline ggml_tensor * hidden_tensor(llama_context * ctx, int32_t layer) {
    const llm_graph_result * result = last_result(ctx);
    return result == nullptr ? nullptr : layer < 0 ? result->get_h_nextn() : result->get_layer_inp(layer);
}

// Has `hidden_rows` get them from now on, or not.
inline void keep_hidden(llama_context * ctx, int32_t layer, bool keeps) {
    if (layer < 0) {
        llama_set_embeddings_nextn(ctx, keeps, /*masked*/ false);
    } else {
        llama_set_embeddings_layer_inp(ctx, static_cast<uint32_t>(layer), keeps);
    }
}

// Those of the last evaluation, in the order of its tokens, until the next one; waits for it. Null for none.
inline const float * hidden_rows(llama_context * ctx, int32_t layer) {
    return layer < 0 ? llama_get_embeddings_nextn(ctx) : llama_get_embeddings_layer_inp(ctx, static_cast<uint32_t>(layer));
}

// That of output i.
inline const float * hidden_row(llama_context * ctx, int32_t i) {
    return llama_get_embeddings_nextn_ith(ctx, i);
}

}  // namespace library
