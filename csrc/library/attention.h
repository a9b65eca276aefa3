// The attention of a model, only for `_pool`.
#pragma once

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>

namespace library {

// Values that a layer makes of one token, at most.
inline size_t attention_width(llama_context * ctx) {
    const llama_hparams & hparams = ctx->get_model().hparams;
    size_t                width   = 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        width = std::max(width, size_t(hparams.n_head(il)) * hparams.n_embd_head_v(il));
    }
    return width;
}

// Whether a token attends to all before it and nothing else, alike at any distance and in a context of any length.
inline bool sees_all_before(llama_context * ctx) {
    const llama_model &   model   = ctx->get_model();
    const llama_hparams & hparams = model.hparams;
    return ctx->get_cparams().causal_attn && !hparams.use_alibi && hparams.swa_type == LLAMA_SWA_TYPE_NONE &&
           std::none_of(model.layers.begin(), model.layers.end(), [](const auto & layer) { return layer.rope_long != nullptr; });
}

}  // namespace library
