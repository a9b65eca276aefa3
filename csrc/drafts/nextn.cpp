// The extension module `_drafts`: HiddenRows, the rows that a model makes of its tokens, and
// NextnHead, the head (its "nextn" block, in a separate context) that predicts further tokens from
// them. They evaluate and copy only.
//
// The loop of `draft` needs only exported functions, but releases the interpreter's lock once for
// all steps. In Python a step would cost 0.02 to 0.1 ms more, and about 1 ms more while another
// thread runs Python, since each step would have to get the lock again.
#include "device/handles.h"
#include "library/context.h"
#include "library/hidden.h"
#include "module.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using float_rows = py::array_t<float, py::array::c_style | py::array::forcecast>;
using token_list = std::vector<llama_token>;

constexpr int32_t last_layer = -1;

// The hidden rows of the tokens of the last evaluation of a model, which has to outlive this: the input of a layer, or where
// that is negative, the output of the last one.
class hidden_rows {
public:
    hidden_rows(uintptr_t address, int32_t layer)
        : ctx(reinterpret_cast<llama_context *>(address)), layer(layer),
          width(library::hidden_width(ctx, layer)) {
        if (layer >= 0 && library::hidden_tensor(ctx, layer) == nullptr) {  // the library would end the process
            throw py::value_error("llama.cpp does not give the rows of layer " + std::to_string(layer) + " of this model");
        }
        library::keep_hidden(ctx, layer, true);
    }

    // Rows of the n tokens evaluated last, in the order of the batch; the memory is the library's until the next one.
    py::array rows(py::ssize_t n) {
        const float * data = nullptr;
        if (n < 0 || n > static_cast<py::ssize_t>(llama_n_batch(ctx))) {
            throw py::value_error("no batch has so many tokens");
        }
        {
            const py::gil_scoped_release release;
            data = library::hidden_rows(ctx, layer);
        }
        return view(data, n);
    }

    // Starts to copy them into memory of this object's own, so that the next evaluation may start. False if nothing
    // would be gained, since the evaluation is complete on return.
    bool start(py::ssize_t n) {
        ggml_tensor *  tensor  = library::hidden_tensor(ctx, layer);
        const auto     sched   = library::scheduler(ctx);
        ggml_backend_t backend = tensor != nullptr ? ggml_backend_sched_get_tensor_backend(sched, tensor) : nullptr;
        const size_t   n_bytes = static_cast<size_t>(n) * width * sizeof(float);
        if (backend == nullptr || ggml_nbytes(tensor) != n_bytes || !prepare(ggml_backend_get_device(backend))) {
            return false;
        }
        at        = 1 - at;
        slot & to = slots[at];
        to.n      = n;
        ggml_backend_tensor_get_async(backend, tensor, ggml_backend_buffer_get_base(to.buffer.get()), 0, n_bytes);
        ggml_backend_event_record(to.copied.get(), backend);
        return true;
    }

    // The copy of the last `start` or, where `before`, of the one before that; it stays for one more `start`.
    py::array finish(bool before) {
        slot & from = slots[before ? 1 - at : at];
        if (from.buffer == nullptr) {
            throw py::value_error("no rows were copied");
        }
        {
            const py::gil_scoped_release release;
            ggml_backend_event_synchronize(from.copied.get());
        }
        return view(static_cast<const float *>(ggml_backend_buffer_get_base(from.buffer.get())), from.n);
    }

private:
    struct slot {
        buffer_handle buffer;  // pinned
        event_handle  copied;
        py::ssize_t   n = 0;
    };

    py::array view(const float * data, py::ssize_t n) const {
        if (data == nullptr) {
            throw std::runtime_error("llama.cpp made no hidden rows");
        }
        return py::array_t<float>({ n, static_cast<py::ssize_t>(width) }, data, py::capsule(data, [](void *) {}));
    }

    // Memory and events of `device`, or false if it works in step with the host.
    bool prepare(ggml_backend_dev_t device) {
        if (slots[1].copied != nullptr) {
            return true;
        }
        ggml_backend_dev_props props{};
        ggml_backend_dev_get_props(device, &props);
        ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(device);
        if (!props.caps.async || !props.caps.events || host == nullptr) {
            return false;
        }
        for (slot & each : slots) {
            each.buffer.reset(ggml_backend_buft_alloc_buffer(host, size_t(llama_n_ubatch(ctx)) * width * sizeof(float)));
            each.copied.reset(ggml_backend_event_new(device));
            if (each.buffer == nullptr || each.copied == nullptr) {
                slots = {};
                return false;
            }
        }
        return true;
    }

    llama_context *     ctx;
    int32_t             layer;
    size_t              width;
    std::array<slot, 2> slots;
    size_t              at = 0;
};

// A sampler that runs on the device: the most likely token. The library's own would have the logits copied to the host.
llama_sampler_i best_interface = [] {
    llama_sampler_i made{};
    made.name          = [](const llama_sampler *) { return "best"; };
    made.backend_init  = [](auto...) { return true; };  // its parameters differ between releases
    made.backend_apply = [](llama_sampler *, ggml_context * ctx, ggml_cgraph *, llama_sampler_data * data) {
        data->sampled = ggml_argmax(ctx, ggml_reshape_1d(ctx, data->logits, ggml_nelements(data->logits)));
        data->logits  = nullptr;
    };
    return made;
}();

// The candidates among which --spec-draft-p-min measures how likely the best one is, as in llama-server.
constexpr int n_compared = 10;

// A context of type MTP: row p of its cache belongs to the token at p and the hidden row before it.
class nextn_head {
public:
    // It must be closed before the context is freed. `gives_all`: its graph makes logits of all rows, so all are outputs.
    nextn_head(uintptr_t address, float p_min, bool gives_all)
        : ctx(reinterpret_cast<llama_context *>(address)), width(library::hidden_width(ctx, last_layer)), p_min(p_min), gives_all(gives_all) {
        const size_t n_seqs = llama_n_seq_max(ctx);
        tokens.resize(std::max<size_t>(llama_n_ubatch(ctx), n_seqs));
        batch = llama_batch_init(static_cast<int32_t>(tokens.size()), static_cast<int32_t>(width), 1);
        batch.token = tokens.data();
        for (size_t seq = 0; seq < n_seqs; ++seq) {
            llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
            llama_sampler_chain_add(chain, p_min > 0 ? llama_sampler_init_top_k(n_compared)
                                                     : llama_sampler_init(&best_interface, nullptr));
            chains.push_back(chain);
            llama_set_sampler(ctx, static_cast<llama_seq_id>(seq), chain);
        }
    }

    ~nextn_head() {
        close();
        batch.token = nullptr;
        llama_batch_free(batch);
    }

    nextn_head(const nextn_head &)             = delete;
    nextn_head & operator=(const nextn_head &) = delete;

    void close() {
        for (size_t seq = 0; seq < chains.size(); ++seq) {
            llama_set_sampler(ctx, static_cast<llama_seq_id>(seq), nullptr);
            llama_sampler_free(chains[seq]);
        }
        chains.clear();
    }

    // Rows [start, start + n) of `seq` from n tokens and the n hidden rows before them; llama_decode's result. No logits
    // are computed, and where a device computes, it has only started on return.
    int evaluate(llama_seq_id seq, llama_pos start, const token_list & given, const float_rows & hidden) {
        check(seq, given.size(), hidden);
        if (given.size() > tokens.size() || rows_of(hidden) != given.size()) {
            throw py::value_error("a batch needs one hidden row for each token, and room");
        }
        const float *                source = hidden.data();
        const py::gil_scoped_release release;
        batch.n_tokens = 0;
        for (size_t i = 0; i < given.size(); ++i) {
            add(seq, start + static_cast<llama_pos>(i), given[i], source + i * width, false);
        }
        library::keep_hidden(ctx, last_layer, false);
        return llama_decode(ctx, batch);
    }

    // `n` tokens after each job's, or fewer where they are not likely enough, or where the head has no room. `window` rows
    // of each are evaluated in every call but the first: as many as there, and one graph serves all. Rows stay as far as
    // the given hidden rows reach. The second value is llama_decode's result, 0 if all went well.
    std::tuple<std::vector<token_list>, int> draft(const std::vector<std::tuple<llama_seq_id, llama_pos, token_list, float_rows>> & items,
                                                   size_t n, size_t window) {
        std::vector<run_state>   states;
        std::vector<run_state *> active;
        states.reserve(items.size());
        window = std::max<size_t>(window, 1);
        for (const auto & [seq, start, given, hidden] : items) {
            check(seq, given.size(), hidden);
            const size_t n_known = rows_of(hidden);
            if (n_known == 0 || n_known > given.size() || items.size() * std::max(n_known, window) > tokens.size()) {
                throw py::value_error("a draft needs one to window hidden rows, and no more than tokens");
            }
            states.push_back({ seq, start, given, { hidden.data(), hidden.data() + n_known * width }, n_known, given.size() });
            active.push_back(&states.back());
        }
        const py::gil_scoped_release release;
        library::keep_hidden(ctx, last_layer, true);
        int result = 0;
        while (n > 0 && !active.empty() && (result = call(active, window)) == 0) {
            const auto is_done = [&](run_state * state) { return !advance(*state, n); };
            active.erase(std::remove_if(active.begin(), active.end(), is_done), active.end());
        }
        std::vector<token_list> drafts;
        for (const run_state & state : states) {
            llama_memory_seq_rm(llama_get_memory(ctx), state.seq, state.start + static_cast<llama_pos>(state.n_known), -1);
            drafts.emplace_back(state.tokens.begin() + static_cast<std::ptrdiff_t>(state.n_given), state.tokens.end());
        }
        return { std::move(drafts), result };
    }

private:
    struct run_state {
        llama_seq_id       seq;
        llama_pos          start;
        token_list         tokens;   // given, then drafted
        std::vector<float> hidden;   // of the token before each, as far as there are
        size_t             n_known;  // of the model's own
        size_t             n_given;
        int32_t            last = 0;  // of its last token in the batch
    };

    static size_t rows_of(const float_rows & hidden) { return static_cast<size_t>(hidden.shape(0)); }

    void check(llama_seq_id seq, size_t n, const float_rows & hidden) const {
        if (seq < 0 || static_cast<uint32_t>(seq) >= llama_n_seq_max(ctx)) {
            throw py::value_error("no such sequence: " + std::to_string(seq));
        }
        if (n == 0 || hidden.ndim() != 2 || static_cast<size_t>(hidden.shape(1)) != width || chains.empty()) {
            throw py::value_error("hidden rows need the shape (n, " + std::to_string(width) + ")");
        }
    }

    void add(llama_seq_id seq, llama_pos position, llama_token token, const float * hidden, bool output) {
        const int32_t i   = batch.n_tokens++;
        tokens[i]         = token;
        batch.pos[i]      = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]   = output;
        std::memcpy(batch.embd + i * width, hidden, width * sizeof(float));
    }

    // Evaluates rows of all of these; llama_decode's result.
    int call(const std::vector<run_state *> & states, size_t window) {
        batch.n_tokens = 0;
        for (run_state * state : states) {
            // Rows that the first call does not cover exist already; evaluating existing rows again gives the same ones.
            const size_t n_hidden = state->hidden.size() / width;
            const size_t first    = n_hidden == state->n_known ? 0 : n_hidden - std::min(window, n_hidden);
            llama_memory_seq_rm(llama_get_memory(ctx), state->seq, state->start + static_cast<llama_pos>(first), -1);
            for (size_t i = first; i < n_hidden; ++i) {
                add(state->seq, state->start + static_cast<llama_pos>(i), state->tokens[i], state->hidden.data() + i * width,
                    gives_all || i + 1 == n_hidden);
            }
            state->last = batch.n_tokens - 1;
        }
        return llama_decode(ctx, batch);
    }

    // Takes from that call a token after all of `state`, up to n in all, and the hidden row after it; false when it is done.
    bool advance(run_state & state, size_t n) {
        if (state.hidden.size() == state.tokens.size() * width) {
            const llama_token token = choose(state.last);
            if (token == LLAMA_TOKEN_NULL) {
                return false;
            }
            state.tokens.push_back(token);
        }
        if (state.tokens.size() == state.n_given + n) {
            return false;
        }
        const float * hidden = library::hidden_row(ctx, state.last);
        state.hidden.insert(state.hidden.end(), hidden, hidden + width);
        return true;
    }

    // The most likely token after output i, or none if it is not likely enough.
    llama_token choose(int32_t i) {
        const llama_token sampled = llama_get_sampled_token_ith(ctx, i);
        if (sampled != LLAMA_TOKEN_NULL) {
            return sampled;
        }
        const bool          has_few    = llama_get_sampled_candidates_count_ith(ctx, i) > 0;
        const llama_token * candidates = has_few ? llama_get_sampled_candidates_ith(ctx, i) : nullptr;
        const float *       logits     = has_few ? llama_get_sampled_logits_ith(ctx, i) : llama_get_logits_ith(ctx, i);
        size_t              n_logits   = has_few ? llama_get_sampled_logits_count_ith(ctx, i)
                                                 : static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
        if (logits == nullptr || n_logits == 0) {
            return LLAMA_TOKEN_NULL;
        }
        const size_t best = static_cast<size_t>(std::max_element(logits, logits + n_logits) - logits);
        if (p_min > 0) {
            std::array<float, n_compared> top;
            top.fill(-INFINITY);
            std::partial_sort_copy(logits, logits + n_logits, top.begin(), top.end(), std::greater<float>());
            float sum = 0;
            for (const float each : top) {
                sum += std::exp(each - top[0]);
            }
            if (1 / sum < p_min) {
                return LLAMA_TOKEN_NULL;
            }
        }
        return candidates != nullptr ? candidates[best] : static_cast<llama_token>(best);
    }

    llama_context *              ctx;
    size_t                       width;
    float                        p_min;
    bool                         gives_all;
    std::vector<llama_sampler *> chains;  // by sequence
    token_list                   tokens;  // of `batch`, for which the library makes room for either these or hidden rows
    llama_batch                  batch{};
};

}  // namespace

PYBIND11_MODULE(_drafts, m) {
    check_module(PYCTL_BUILD);
    py::class_<hidden_rows>(m, "HiddenRows")
        .def(py::init<uintptr_t, int32_t>(), py::arg("ctx"), py::arg("layer") = -1)
        .def("rows", &hidden_rows::rows, py::arg("n"))
        .def("start", &hidden_rows::start, py::arg("n"))
        .def("finish", &hidden_rows::finish, py::arg("before") = false);
    py::class_<nextn_head>(m, "NextnHead")
        .def(py::init<uintptr_t, float, bool>(), py::arg("ctx"), py::arg("p_min") = 0.0f, py::arg("gives_all") = false)
        .def("close", &nextn_head::close)
        .def("evaluate", &nextn_head::evaluate, py::arg("seq"), py::arg("start"), py::arg("tokens"), py::arg("hidden"))
        .def("draft", &nextn_head::draft, py::arg("items"), py::arg("n"), py::arg("window") = 1);
}
