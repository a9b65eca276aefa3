// Registers sample_best: a token out of the k best of an output, by a chain of samplers that would begin with just that.
// The library itself writes an entry for each of 250,000 tokens and sorts them, which takes longer than the rest.
#include "llama.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace py = pybind11;

namespace {

constexpr size_t block = 128, lanes = 16;

// The largest of the n numbers at `data`, n > 0; those that are none do not count.
float largest(const float * data, size_t n) {
    float best[lanes];
    std::fill_n(best, lanes, -std::numeric_limits<float>::infinity());
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (size_t j = 0; j < lanes; ++j) {
            best[j] = data[i + j] > best[j] ? data[i + j] : best[j];
        }
    }
    for (; i < n; ++i) {
        best[0] = data[i] > best[0] ? data[i] : best[0];
    }
    return *std::max_element(best, best + lanes);
}

bool is_better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The k best of n logits, best first. In k of the blocks the largest is at least as good as the k-th best of these.
std::vector<llama_token_data> best_of(const float * logits, size_t n, size_t k) {
    std::vector<float> maxima;
    for (size_t i = 0; i < n; i += block) {
        maxima.push_back(largest(logits + i, std::min(block, n - i)));
    }
    float least = -std::numeric_limits<float>::infinity();
    if (maxima.size() > k) {
        std::vector<float> ordered = maxima;
        std::nth_element(ordered.begin(), ordered.begin() + static_cast<std::ptrdiff_t>(k - 1), ordered.end(), std::greater<float>());
        least = ordered[k - 1];
    }
    std::vector<llama_token_data> found;
    for (size_t at = 0; at < maxima.size(); ++at) {
        if (maxima[at] < least) {
            continue;
        }
        for (size_t i = at * block; i < std::min((at + 1) * block, n); ++i) {
            if (logits[i] >= least) {
                found.push_back({ static_cast<llama_token>(i), logits[i], 0.0f });
            }
        }
    }
    if (found.size() > k) {
        std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(k), found.end(), is_better);
        found.resize(k);
    }
    std::sort(found.begin(), found.end(), is_better);
    return found;
}

// A token of output `index`, which the chain remembers; -1, and it was not asked, where no logit is a number.
llama_token sample_best(uintptr_t chain_address, uintptr_t ctx_address, int32_t index, size_t k) {
    auto *        chain  = reinterpret_cast<llama_sampler *>(chain_address);
    auto *        ctx    = reinterpret_cast<llama_context *>(ctx_address);
    const float * logits = llama_get_logits_ith(ctx, index);
    if (logits == nullptr || k == 0) {
        return LLAMA_TOKEN_NULL;
    }
    const auto n_vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    std::vector<llama_token_data> found = best_of(logits, n_vocab, k);
    if (found.empty()) {
        return LLAMA_TOKEN_NULL;
    }
    llama_token_data_array candidates{ found.data(), found.size(), -1, /*sorted*/ true };
    llama_sampler_apply(chain, &candidates);
    if (candidates.selected < 0 || static_cast<size_t>(candidates.selected) >= candidates.size) {
        return LLAMA_TOKEN_NULL;
    }
    const llama_token token = candidates.data[candidates.selected].id;
    llama_sampler_accept(chain, token);
    return token;
}

}  // namespace

void register_sample_best(py::module_ & m) {
    m.def("sample_best", &sample_best, py::arg("chain"), py::arg("ctx"), py::arg("index"), py::arg("k"),
          py::call_guard<py::gil_scoped_release>());
}
