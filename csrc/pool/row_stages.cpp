#include "pool/row_stages.h"

#include <algorithm>
#include <tuple>

namespace {

double ms_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

row_stages::row_stages(transfer & copies, const std::vector<stored_layer> & all, int64_t n_rows, size_t n_stages,
                       ggml_backend_buffer_type_t device)
    : copies(copies), all(all) {
    size_t k_row = 0, v_row = 0;
    for (size_t i = 0; i < all.size(); ++i) {
        if (!all[i].resident) {
            streamed.push_back(i);
            k_row = std::max(k_row, all[i].k_of_cache.row);
            v_row = std::max(v_row, all[i].v_of_cache.row);
        }
    }
    stages.resize(std::min(n_stages, streamed.size()));
    for (stage & stage : stages) {
        stage.k = allocate_zeros(device, static_cast<size_t>(n_rows) * k_row + row_slack);
        stage.v = allocate_zeros(device, static_cast<size_t>(n_rows) * v_row + row_slack);
    }
}

size_t row_stages::order_of(size_t index) const {
    return static_cast<size_t>(std::lower_bound(streamed.begin(), streamed.end(), index) - streamed.begin());
}

size_t row_stages::bytes() const {
    size_t sum = 0;
    for (const stage & stage : stages) {
        sum += stage.k.size() + stage.v.size();
    }
    return sum;
}

// The first `n` rows of the layer that `stage` holds, as far as they are not there.
void row_stages::fill(stage & stage, int64_t n) {
    if (stage.n >= n) {
        return;
    }
    const stored_layer & layer = all[streamed[stage.holds]];
    for (auto [to, row, from] : { std::tuple(&stage.k, layer.k_of_cache.row, &layer.k),
                                  std::tuple(&stage.v, layer.v_of_cache.row, &layer.v) }) {
        const size_t at   = static_cast<size_t>(stage.n) * row;
        const size_t size = static_cast<size_t>(n - stage.n) * row;
        copies.load({ &to->bytes, at, size }, from->data() + at);
        n_streamed += size;
    }
    stage.n      = n;
    stage.loaded = copies.progress().take();
}

void row_stages::wait(stage & stage) {
    const auto start = std::chrono::steady_clock::now();
    copies.progress().wait(stage.loaded);
    waited += ms_since(start);
}

void row_stages::prepare(int64_t n) {
    if (stages.empty()) {
        return;
    }
    copies.load_begin();
    for (size_t i = 0; i < stages.size(); ++i) {
        if (stages[i].holds != i) {
            stages[i].holds = i;
            stages[i].n     = 0;
        }
        fill(stages[i], n);
    }
    wait(stages[0]);
}

void row_stages::layer_done(size_t index, int64_t first, int64_t last) {
    const size_t         i     = order_of(index);
    const stored_layer & done  = all[index];
    stage &              place = stage_of(i);
    for (auto [from, row, to] : { std::tuple(&place.k, done.k_of_cache.row, &done.k),
                                  std::tuple(&place.v, done.v_of_cache.row, &done.v) }) {
        const size_t at = static_cast<size_t>(first) * row;
        copies.save({ &from->bytes, at, static_cast<size_t>(last - first) * row }, to->data() + at);
    }
    place.n = last;
    home    = copies.progress().take();

    const bool   wraps = i + stages.size() >= streamed.size();
    const size_t next  = wraps ? i % stages.size() : i + stages.size();
    if (next != i) {
        place.holds = next;
        place.n     = 0;
        fill(place, wraps ? last : first);
    }
    if (i + 1 < streamed.size()) {
        wait(stage_of(i + 1));
    }
}

void row_stages::truncate(int64_t n) {
    for (stage & stage : stages) {
        stage.n = std::min(stage.n, n);
    }
}

double row_stages::copy_rate() {
    if (stages.empty()) {
        return 0.0;
    }
    const stored_layer & layer = all[streamed[0]];
    const size_t         size  = std::min({ stages[0].k.size(), layer.k.size(), size_t(256) << 20 });
    double               best  = 0.0;
    for (int i = 0; i < 3; ++i) {
        copies.finish();
        const auto start = std::chrono::steady_clock::now();
        copies.load({ &stages[0].k.bytes, 0, size }, layer.k.data());
        copies.finish();
        best = std::max(best, static_cast<double>(size) / std::max(ms_since(start) / 1e3, 1e-9));
    }
    stages[0].holds = 0;
    stages[0].n     = 0;
    return best;
}
