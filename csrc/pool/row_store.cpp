#include "pool/row_store.h"

#include "core/cells.h"
#include "library/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace {

constexpr llama_seq_id only_seq = 0;

constexpr size_t bytes_for_threads = size_t(16) << 20;
constexpr size_t bytes_per_piece   = size_t(4) << 20;
constexpr size_t max_threads      = 4;

}  // namespace

// A copy within host memory; none may overlap another.
struct row_store::host_copy {
    uint8_t *       to;
    const uint8_t * from;
    size_t          size;
};

// By several threads where one does not reach the speed of the memory. They are complete when it returns.
void row_store::copy_on_host(const std::vector<host_copy> & parts) {
    std::vector<host_copy> pieces;
    size_t                 sum = 0;
    for (const host_copy & part : parts) {
        sum += part.size;
        for (size_t at = 0; at < part.size; at += bytes_per_piece) {
            pieces.push_back({ part.to + at, part.from + at, std::min(bytes_per_piece, part.size - at) });
        }
    }
    std::atomic<size_t> next{ 0 };
    const auto          work = [&] {
        for (size_t i = next++; i < pieces.size(); i = next++) {
            std::memcpy(pieces[i].to, pieces[i].from, pieces[i].size);
        }
    };
    const size_t n_threads = sum < bytes_for_threads ? 1 : std::min<size_t>(max_threads, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (size_t i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

row_store::row_store(llama_context * ctx, library::cache cache, const row_layout & layout, uint64_t hash,
                     transfer & copies, const store_settings & settings)
    : row_memory(layout, hash, copies, static_cast<size_t>(std::max(settings.n_ctx, int64_t(0)))), ctx(ctx), cache(cache),
      n_ctx(settings.n_ctx) {
    check_context();
    if (n_ctx < 1 || n_ctx > last_position) {
        throw std::invalid_argument("a store of " + std::to_string(n_ctx) + " rows cannot be made");
    }
    open(settings);
    truncate(only_seq, 0);
}

void row_store::check_context() const {
    const auto refuse = [](const std::string & why) {
        throw std::runtime_error("attention of this model cannot read rows that lie elsewhere: " + why);
    };
    if (llama_n_seq_max(ctx) != 1) {
        refuse("there is more than one sequence");
    }
    if (layout.k.empty() || layout.k.size() != layout.v.size()) {
        refuse("keys and values are not kept apart");
    }
    if (layout.v_transposed) {
        refuse("it needs flash attention");
    }
    if (!library::sees_all_before(ctx)) {
        refuse("tokens do not just see all that came before, or otherwise in a long context");
    }
    for (const auto * tensors : { &layout.k, &layout.v }) {
        for (const row_tensor & part : *tensors) {
            if (part.type == GGML_TYPE_F32) {
                refuse("keys or values have type f32");
            }
            if (ggml_backend_buffer_get_type(buffer_of(part.parts[0].tensor)) !=
                ggml_backend_buffer_get_type(buffer_of(layout.k[0].parts[0].tensor)) || part.parts.size() > 1) {
                refuse("its layers lie on several devices");
            }
        }
    }
}

void row_store::open(const store_settings & settings) {
    const int64_t              n_padded = GGML_PAD(n_ctx, redirect::padding);
    ggml_backend_buffer_type_t device   = ggml_backend_buffer_get_type(buffer_of(layout.k[0].parts[0].tensor));
    size_t                     n_streamed = 0;
    for (size_t i = 0; i < layout.k.size(); ++i) {
        const bool   resident = std::count(settings.resident.begin(), settings.resident.end(), i) > 0;
        const auto   type     = resident ? device : host_type_beside(device);
        stored_layer layer{ resident, resident ? 0 : n_streamed++, { layout.k[i].row, layout.v[i].row }, {} };
        for (size_t part = 0; part < 2; ++part) {
            layer.rows[part] = allocate_zeros(type, static_cast<size_t>(n_padded) * layer.row[part] + row_slack);
        }
        layers.push_back(std::move(layer));
    }
    stages = std::make_unique<row_stages>(copies, layers, n_padded, settings.n_stages, device);
    std::vector<redirect::place> places;
    for (const stored_layer & layer : layers) {
        const kv_buffers & rows = layer.resident ? layer.rows : stages->rows_of(layer);
        places.push_back({ { &rows[0].bytes, &rows[1].bytes }, !layer.resident });
    }
    attention = std::make_unique<redirect>(ctx, layout, copies, n_padded, llama_n_ubatch(ctx), places,
                                           [this](size_t i) { stages->layer_done(layers[i], n_rows, n_next); });
}

// -- evaluation --------------------------------------------------------------------------------------------------------

void row_store::check_batch(const llama_batch & batch) const {
    bool is_next = batch.n_tokens > 0 && batch.n_tokens <= static_cast<int32_t>(llama_n_ubatch(ctx)) &&
                   batch.token != nullptr && batch.pos != nullptr && batch.n_seq_id != nullptr && batch.seq_id != nullptr;
    for (int32_t i = 0; is_next && i < batch.n_tokens; ++i) {
        is_next = batch.pos[i] == n_rows + i && batch.n_seq_id[i] == 1 && batch.seq_id[i][0] == only_seq;
    }
    if (!is_next) {
        throw std::invalid_argument("these are not up to " + std::to_string(llama_n_ubatch(ctx)) +
                                    " tokens of sequence 0 from position " + std::to_string(n_rows) + " on");
    }
}

void row_store::reserve(int64_t n, bool) {
    check_room(n_rows, n_rows + n);
}

// Whether rows [p0, p1) can be written.
void row_store::check_room(int64_t p0, int64_t p1) const {
    if (p1 > n_ctx) {
        throw out_of_cells("rows " + range_text(p0, p1) + " are not all among " + std::to_string(n_ctx));
    }
    for (int64_t row = p0; row < p1; ++row) {
        if (held.holds(row)) {
            throw out_of_cells("row " + std::to_string(row) + " of something else is held");
        }
    }
}

int row_store::decode(const llama_batch & batch) {
    check_batch(batch);
    reserve(batch.n_tokens, false);
    n_next = n_rows + batch.n_tokens;
    if (n_rows > 1) {
        llama_memory_seq_rm(cache.memory(), only_seq, 0, static_cast<llama_pos>(n_rows - 1));
    }
    stages->prepare(n_rows);
    attention->begin(n_rows, n_next);
    int code = -1;
    try {
        code = llama_decode(ctx, batch);
    } catch (...) {
        attention->end();
        failed();
        throw;
    }
    const std::string failure = attention->end();
    if (code != 0 || !failure.empty()) {
        failed();
        if (code == 0) {
            throw std::runtime_error(failure);
        }
        return code;
    }
    remember_exts(n_rows, n_next);
    move_end(n_next);
    return code;
}

// Rows of the failed evaluation do not count.
void row_store::failed() {
    copies.finish();
    truncate(only_seq, n_rows);
}

void row_store::remember_exts(int64_t p0, int64_t p1) {
    if (!layout.has_ext) {
        return;
    }
    exts.resize(static_cast<size_t>(p1));
    for (int64_t cell = 0; cell < cache.size(); ++cell) {
        if (cache.has(cell, only_seq, static_cast<llama_pos>(p0), static_cast<llama_pos>(p1))) {
            exts[static_cast<size_t>(cache.position(cell))] = cache.extra(cell);
        }
    }
}

// Of a sequence whose end is elsewhere the library gets one row, the last; its bytes mean nothing.
void row_store::place_last() {
    llama_memory_seq_rm(cache.memory(), only_seq, static_cast<llama_pos>(n_rows), -1);
    if (llama_memory_seq_pos_max(cache.memory(), only_seq) + 1 == n_rows) {
        return;
    }
    llama_memory_seq_rm(cache.memory(), only_seq, -1, -1);
    const int64_t cell = take(cache, cache.find(1), only_seq, { static_cast<llama_pos>(n_rows - 1) }, n_rows - 1)[0].cell;
    if (layout.has_ext) {
        cache.set_extra(cell, exts[static_cast<size_t>(n_rows - 1)]);
    }
}

// -- out and in --------------------------------------------------------------------------------------------------------

// Calls `function(bytes of a row, where rows [p0, p1) are, and where on the host or null)` in the order of a block.
template <typename F> void row_store::each_plane(int64_t p0, int64_t p1, const F & function) {
    for (size_t part = 0; part < 2; ++part) {
        for (stored_layer & layer : layers) {
            const size_t row  = layer.row[part];
            const size_t from = static_cast<size_t>(p0) * row;
            function(row, copy_region{ &layer.rows[part].bytes, from, static_cast<size_t>(p1 - p0) * row },
                     layer.resident ? nullptr : layer.rows[part].data() + from);
        }
    }
}

void row_store::copy_out(const std::vector<cell_run> &, int64_t p0, int64_t p1, uint8_t * out) {
    std::vector<host_copy> on_host;
    each_plane(p0, p1, [&](size_t, const copy_region & rows, uint8_t * host) {
        if (host == nullptr) {
            copies.save(rows, out);
        } else {
            on_host.push_back({ out, host, rows.size });
        }
        out += rows.size;
    });
    stages->wait_home();
    copy_on_host(on_host);
}

// Throws unless the sequence has these rows.
void row_store::check_end(int64_t p0, int64_t p1) const {
    if (p1 > n_rows) {
        refuse("sequence 0 holds " + std::to_string(n_rows) + " rows, not all of " + range_text(p0, p1));
    }
}

void row_store::check_text(const row_span & span) const {
    int64_t row = span.first;
    for (const cell_extra & ext : layout.is_2d ? exts_of({ span }) : std::vector<cell_extra>()) {
        if (ext.token < 0 || ext.x != row || ext.y != row) {
            refuse("images cannot be in this memory");
        }
        ++row;
    }
}

// The rows of a block go to their places.
void row_store::copy_in(const row_span & span, std::vector<host_copy> & on_host) {
    const block_header header = read_header(span.data, span.size, rows_block, hash);
    const auto         whole  = static_cast<size_t>(header.p1 - header.p0);
    const auto         skip   = static_cast<size_t>(span.first - header.p0);
    const uint8_t *    at     = span.data + sizeof(block_header) + whole * layout.ext_bytes();
    each_plane(span.first, span.last, [&](size_t row, const copy_region & rows, uint8_t * host) {
        if (host == nullptr) {
            copies.load(rows, at + skip * row);
        } else {
            on_host.push_back({ host, at + skip * row, rows.size });
        }
        at += whole * row;
    });
}

int64_t row_store::position_after(llama_seq_id, int64_t p0, const std::vector<row_span> & spans) const {
    for (const row_span & span : spans) {
        if (span.held == 0) {
            check_text(span);
            check_room(span.first, span.last);
        }
    }
    return spans.empty() ? p0 : spans.back().last;
}

// Held rows are in their place.
void row_store::load_checked(llama_seq_id, int64_t, const std::vector<row_span> & spans) {
    stages->wait_home();
    copies.load_begin();
    std::vector<host_copy> on_host;
    for (const row_span & span : spans) {
        if (span.held == 0) {
            copy_in(span, on_host);
        }
    }
    const std::vector<cell_extra> their_exts = exts_of(spans);
    exts.resize(layout.has_ext ? static_cast<size_t>(n_rows) : 0);
    exts.insert(exts.end(), their_exts.begin(), their_exts.end());
    copies.load_end();
    is_reading = false;
    copy_on_host(on_host);
    move_end(spans.back().last);
    place_last();
}

// -- rows that stay ----------------------------------------------------------------------------------------------------

held_rows::handle row_store::hold(llama_seq_id, int64_t p0, int64_t p1) {
    size(p0, p1);
    check_end(p0, p1);
    std::vector<cell_extra> their_exts;
    if (layout.has_ext) {
        their_exts.assign(exts.begin() + p0, exts.begin() + p1);
    }
    return held.add(p0, p1, { { p0, p0, p1 - p0 } }, std::move(their_exts));
}

// The sequence has n rows now.
void row_store::move_end(int64_t n) {
    for (; n_rows < n; ++n_rows) {
        n_only_held -= held.holds(n_rows) ? 1 : 0;
    }
    for (; n_rows > n; --n_rows) {
        n_only_held += held.holds(n_rows - 1) ? 1 : 0;
    }
}

void row_store::truncate(llama_seq_id, int64_t n) {
    if (n < n_rows) {
        fence();
    }
    move_end(std::min(n_rows, n));
    stages->truncate(n_rows);
    place_last();
}
