#include "pool/row_stages.h"

#include <algorithm>
#include <chrono>

row_stages::row_stages(transfer & copies, const std::vector<stored_layer> & all, int64_t n_rows, size_t n_stages,
                       ggml_backend_buffer_type_t device)
    : copies(copies) {
    std::array<size_t, 2> largest{};
    for (const stored_layer & layer : all) {
        for (size_t part = 0; part < 2 && !layer.resident; ++part) {
            largest[part] = std::max(largest[part], layer.row[part]);
        }
        if (!layer.resident) {
            streamed.push_back(&layer);
        }
    }
    stages.resize(std::min(std::max<size_t>(n_stages, 1), streamed.size()));
    for (stage & stage : stages) {
        for (size_t part = 0; part < 2; ++part) {
            stage.rows[part] = allocate_zeros(device, static_cast<size_t>(n_rows) * largest[part] + row_slack);
        }
    }
}

// Layer i, in their order, has its first `n` rows in its `stage`, which may have some of them.
void row_stages::fill(stage & stage, size_t i, int64_t n) {
    if (stage.holds != i) {
        stage.holds = i;
        stage.n     = 0;
    }
    if (stage.n >= n) {
        return;
    }
    const stored_layer & layer = *streamed[i];
    for (size_t part = 0; part < 2; ++part) {
        const size_t at   = static_cast<size_t>(stage.n) * layer.row[part];
        const size_t size = static_cast<size_t>(n - stage.n) * layer.row[part];
        copies.load({ &stage.rows[part].bytes, at, size }, layer.rows[part].data() + at);
        n_streamed += size;
    }
    stage.n      = n;
    stage.loaded = copies.progress().take();
}

void row_stages::wait(stage & stage) {
    const auto start = std::chrono::steady_clock::now();
    copies.progress().wait(stage.loaded);
    waited += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void row_stages::prepare(int64_t n) {
    if (stages.empty()) {
        return;
    }
    copies.load_begin();
    for (size_t i = 0; i < stages.size(); ++i) {
        fill(stages[i], i, n);
    }
    wait(stages[0]);
}

void row_stages::layer_done(const stored_layer & layer, int64_t first, int64_t last) {
    const size_t i     = layer.order;
    stage &      place = stage_of(i);
    for (size_t part = 0; part < 2; ++part) {
        const size_t at = static_cast<size_t>(first) * layer.row[part];
        copies.save({ &place.rows[part].bytes, at, static_cast<size_t>(last - first) * layer.row[part] },
                    layer.rows[part].data() + at);
    }
    place.n = last;
    home    = copies.progress().take();

    const bool wraps = i + stages.size() >= streamed.size();
    fill(place, wraps ? i % stages.size() : i + stages.size(), wraps ? last : first);
    if (i + 1 < streamed.size()) {
        wait(stage_of(i + 1));
    }
}

void row_stages::truncate(int64_t n) {
    for (stage & stage : stages) {
        stage.n = std::min(stage.n, n);
    }
}
