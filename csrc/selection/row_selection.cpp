#include "selection/row_selection.h"

#include <iterator>
#include <numeric>
#include <set>
#include <tuple>

namespace {

int64_t chunks_for(int64_t n) {
    return (n + chunk_rows - 1) / chunk_rows;
}

selection_settings checked(selection_settings settings, int64_t n_rows) {
    if (settings.rows < chunk_rows || settings.sinks < 0 || settings.tail < 0 || settings.batch < 1 || settings.block < 1 ||
        chunk_rows % settings.block != 0) {
        throw std::invalid_argument("of " + std::to_string(settings.rows) + " rows, " + std::to_string(settings.sinks) +
                                    " sinks, a tail of " + std::to_string(settings.tail) + ", blocks of " +
                                    std::to_string(settings.block) + " and batches of " + std::to_string(settings.batch) +
                                    " nothing can be chosen");
    }
    settings.rows  = std::min(settings.rows, n_rows);
    settings.sinks = std::min(settings.sinks, n_rows);
    settings.tail  = std::min(settings.tail, n_rows);
    settings.batch = std::min(settings.batch, n_rows);
    return settings;
}

}  // namespace

row_selection::row_selection(llama_context * ctx, transfer & copies, std::vector<stored_layer> & layers, int64_t n_rows,
                             const selection_settings & settings, ggml_backend_buffer_type_t device)
    : copies(copies), layers(layers), n_rows(n_rows), own(checked(settings, n_rows)), n_sinks(chunks_for(own.sinks)),
      n_chosen(own.rows / chunk_rows), n_ring(chunks_for(own.tail + own.batch + chunk_rows - 1)),
      means(ctx, copies, layers, n_rows, own.block, own.batch, device), streams(layers.size()) {
    const int64_t n_chunks = n_sinks + n_chosen + n_ring;
    const auto    n_slots  = static_cast<size_t>(n_chunks * chunk_rows);
    const auto    n_read   = (n_slots + redirect::padding - 1) / redirect::padding * redirect::padding;
    size_t        k_row = 0, v_row = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        const stored_layer & layer = layers[i];
        k_row                      = std::max(k_row, layer.k_of_cache.row);
        v_row                      = std::max(v_row, layer.v_of_cache.row);
        if (!layer.resident) {
            streams[i].k = allocate_zeros(device, n_slots * layer.k_of_cache.row + row_slack);
            streams[i].v = allocate_zeros(device, n_slots * layer.v_of_cache.row + row_slack);
            streams[i].chunk_in.assign(static_cast<size_t>(n_sinks + n_chosen), -1);
            streams[i].slot_of.assign(static_cast<size_t>(n_rows / chunk_rows), -1);
        }
    }
    k        = allocate_zeros(device, n_read * k_row + row_slack);
    v        = allocate_zeros(device, n_read * v_row + row_slack);
    sources  = allocate_zeros(device, static_cast<size_t>(n_chunks) * sizeof(int32_t));
    targets  = allocate_zeros(device, static_cast<size_t>(own.batch) * sizeof(int64_t));
    new_rows.resize(static_cast<size_t>(own.batch));
    means.on_device().reserve([&](ggml_context * tensors) { return in_order(tensors, k, k_row, v, 1); });
    for (size_t i = 0; i < layers.size(); ++i) {
        stored_layer & layer = layers[i];
        stream &       slots = streams[i];
        if (layer.resident) {
            places.push_back({ &layer.k.bytes, &layer.v.bytes, false, nullptr });
        } else {
            places.push_back({ &slots.k.bytes, &slots.v.bytes, false, &targets.bytes });
        }
    }
}

size_t row_selection::bytes() const {
    size_t sum = means.bytes() + k.size() + v.size() + sources.size() + targets.size();
    for (const stream & slots : streams) {
        sum += slots.k.size() + slots.v.size();
    }
    return sum;
}

void row_selection::pin(const std::vector<std::pair<int64_t, int64_t>> & ranges) {
    std::set<int32_t> chunks;
    for (const auto & [from, to] : ranges) {
        if (from < 0 || to <= from || to > n_rows) {
            throw std::invalid_argument("rows from " + std::to_string(from) + " to " + std::to_string(to) + " are not a range of " +
                                        std::to_string(n_rows));
        }
        for (int64_t chunk = std::max(n_sinks, from / chunk_rows); chunk < chunks_for(to); ++chunk) {
            chunks.insert(static_cast<int32_t>(chunk));
        }
    }
    if (static_cast<int64_t>(chunks.size()) > n_chosen) {
        throw std::invalid_argument("there is no room to pin " + std::to_string(chunks.size()) + " chunks among " +
                                    std::to_string(n_chosen));
    }
    pinned.assign(chunks.begin(), chunks.end());
}

void row_selection::truncate(int64_t n) {
    means.truncate(n);
    ring_last = std::min(ring_last, n);
    for (stream & slots : streams) {
        for (int32_t & chunk : slots.chunk_in) {
            if (chunk >= n / chunk_rows) {
                slots.slot_of[static_cast<size_t>(chunk)] = -1;
                chunk                                     = -1;
            }
        }
    }
}

// Calls `copy(bytes in the ring, position in host memory)` for the parts of rows [from, to) of streamed layers that lie
// in one chunk each.
template <typename F> void row_selection::each_part(int64_t from, int64_t to, const F & copy) {
    for (size_t i = 0; i < layers.size(); ++i) {
        stored_layer & layer = layers[i];
        if (layer.resident) {
            continue;
        }
        for (auto [ring, row, home] : { std::tuple(&streams[i].k, layer.k_of_cache.row, &layer.k),
                                        std::tuple(&streams[i].v, layer.v_of_cache.row, &layer.v) }) {
            for (int64_t at = from; at < to;) {
                const int64_t n = std::min(to, (at / chunk_rows + 1) * chunk_rows) - at;
                copy({ &ring->bytes, static_cast<size_t>(ring_row(at)) * row, static_cast<size_t>(n) * row },
                     home->data() + static_cast<size_t>(at) * row);
                at += n;
            }
        }
    }
}

void row_selection::fill_ring(int64_t from, int64_t to) {
    copies.load_begin();
    each_part(from, to, [&](const copy_region & ring, const uint8_t * home) { copies.load(ring, home); });
    copies.load_end();
}

const std::vector<redirect::place> & row_selection::begin(int64_t from, int64_t to) {
    first                = from;
    last                 = to;
    const int64_t wanted = tail_of(first) * chunk_rows;
    if (ring_first > wanted || ring_last < wanted) {
        ring_last = wanted;
    }
    ring_first = wanted;
    if (ring_last < first) {
        fill_ring(ring_last, first);
        ring_last = first;
    }
    for (int64_t i = 0; i < last - first; ++i) {
        new_rows[static_cast<size_t>(i)] = ring_row(first + i);
    }
    copies.put({ &targets.bytes, 0, static_cast<size_t>(last - first) * sizeof(int64_t) },
               reinterpret_cast<const uint8_t *>(new_rows.data()));
    return places;
}

redirect::gathered row_selection::target() {
    return { &k.bytes, &v.bytes, (n_sinks + n_chosen - tail_of(first)) * chunk_rows + first };
}

// What is pinned comes first, then what gets most; of equal ones the first.
void row_selection::choose(size_t index, const std::vector<float> & shares) {
    const int64_t          end = tail_of(first);
    std::vector<int32_t> & chosen = streams[index].chosen;
    std::vector<int32_t>   others(static_cast<size_t>(end - n_sinks));
    std::iota(others.begin(), others.end(), static_cast<int32_t>(n_sinks));
    chosen.assign(pinned.begin(), std::lower_bound(pinned.begin(), pinned.end(), static_cast<int32_t>(end)));
    others.erase(std::remove_if(others.begin(), others.end(),
                                [&](int32_t chunk) { return std::binary_search(chosen.begin(), chosen.end(), chunk); }),
                 others.end());
    const auto share = [&](int32_t chunk) {
        const float value = shares[static_cast<size_t>(chunk - n_sinks)];
        return value >= 0.0f ? value : 0.0f;  // not a number is least
    };
    const auto n = static_cast<std::ptrdiff_t>(n_chosen) - static_cast<std::ptrdiff_t>(chosen.size());
    std::partial_sort(others.begin(), others.begin() + n, others.end(), [&](int32_t one, int32_t other) {
        return share(one) != share(other) ? share(one) > share(other) : one < other;
    });
    chosen.insert(chosen.end(), others.begin(), others.begin() + n);
    std::sort(chosen.begin(), chosen.end());
    n_selected += chosen.size();
}

// Sees to it that all of `order`, numbers of chunks, have slots, and makes these of it. Neighbours are copied at once
// where their slots are neighbours, too.
void row_selection::fetch(size_t index) {
    stream &       slots = streams[index];
    const auto     tail  = static_cast<int32_t>(tail_of(first));
    const auto     wants = [&](int32_t chunk) { return std::binary_search(order.begin(), order.end(), chunk); };
    const uint64_t began = n_fetched;
    size_t         slot = 0, count = 0;  // the latter are to be copied, up to `last_chunk` and before `slot`
    int32_t        last_chunk = -1;
    for (const int32_t chunk : order) {
        if (chunk >= tail) {
            break;
        }
        if (slots.slot_of[static_cast<size_t>(chunk)] >= 0) {
            continue;
        }
        const size_t next = slot;
        while (slots.chunk_in[slot] >= 0 && wants(slots.chunk_in[slot])) {
            ++slot;
        }
        if (slot != next || chunk != last_chunk + 1) {
            copy_chunks(index, static_cast<size_t>(last_chunk + 1) - count, next - count, count);
            count = 0;
        }
        if (slots.chunk_in[slot] >= 0) {
            slots.slot_of[static_cast<size_t>(slots.chunk_in[slot])] = -1;
        }
        slots.chunk_in[slot]                       = chunk;
        slots.slot_of[static_cast<size_t>(chunk)] = static_cast<int32_t>(slot);
        last_chunk                                 = chunk;
        ++slot;
        ++count;
        ++n_fetched;
    }
    copy_chunks(index, static_cast<size_t>(last_chunk + 1) - count, slot - count, count);
    if (n_fetched > began) {
        copies.load_end();
    }
    for (int32_t & chunk : order) {
        chunk = chunk >= tail ? static_cast<int32_t>(chunk % n_ring)
                              : static_cast<int32_t>(n_ring) + slots.slot_of[static_cast<size_t>(chunk)];
    }
}

// `count` chunks of layer `index` from `chunk` on go to slots from `slot` on.
void row_selection::copy_chunks(size_t index, size_t chunk, size_t slot, size_t count) {
    stream &       slots = streams[index];
    stored_layer & layer = layers[index];
    for (auto [to, row, from] : { std::tuple(&slots.k, layer.k_of_cache.row, &layer.k),
                                  std::tuple(&slots.v, layer.v_of_cache.row, &layer.v) }) {
        const size_t size = row * static_cast<size_t>(chunk_rows);
        if (count > 0) {
            copies.load({ &to->bytes, (static_cast<size_t>(n_ring) + slot) * size, count * size }, from->data() + chunk * size);
        }
    }
}

// The `n` chunks of `from` that `sources` names, of rows of `row` bytes, one behind the other in `to`.
ggml_tensor * row_selection::in_order(ggml_context * ctx, const tensor_buffer & from, size_t row, const tensor_buffer & to,
                                      int64_t n) const {
    const auto    words = static_cast<int64_t>(row) * chunk_rows / static_cast<int64_t>(sizeof(int32_t));
    const auto    whole = static_cast<int64_t>(from.size() / (row * static_cast<size_t>(chunk_rows)));
    ggml_tensor * all   = device_graph::outside(ctx, GGML_TYPE_I32, from.buffer.get(), from.data(), words, whole);
    ggml_tensor * which = device_graph::outside(ctx, GGML_TYPE_I32, sources.buffer.get(), sources.data(), n, 1);
    ggml_tensor * found = ggml_get_rows(ctx, all, which);
    found->buffer       = to.buffer.get();
    found->data         = to.data();
    return found;
}

void row_selection::gather(size_t index, const ggml_tensor & attention) {
    const int64_t tail = tail_of(first);
    choose(index, means.shares(index, attention, n_sinks, tail));
    order.resize(static_cast<size_t>(n_sinks));
    std::iota(order.begin(), order.end(), 0);
    order.insert(order.end(), streams[index].chosen.begin(), streams[index].chosen.end());
    for (int64_t chunk = tail; chunk < chunks_for(last); ++chunk) {
        order.push_back(static_cast<int32_t>(chunk));
    }
    const stored_layer & layer = layers[index];
    if (!layer.resident) {
        fetch(index);
    }
    copies.put({ &sources.bytes, 0, order.size() * sizeof(int32_t) }, reinterpret_cast<const uint8_t *>(order.data()));
    const auto n = static_cast<int64_t>(order.size());
    for (auto [from, row, to] : { std::tuple(layer.resident ? &layer.k : &streams[index].k, layer.k_of_cache.row, &k),
                                  std::tuple(layer.resident ? &layer.v : &streams[index].v, layer.v_of_cache.row, &v) }) {
        means.on_device().run([&, from = from, row = row, to = to](ggml_context * ctx) {
            return in_order(ctx, *from, row, *to, n);
        });
    }
}

void row_selection::end() {
    ring_last = last;
    copies.save_begin();
    each_part(first, last, [&](const copy_region & ring, uint8_t * home) { copies.save(ring, home); });
}
