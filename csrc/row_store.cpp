#include "row_store.h"

#include "block.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

namespace {

// Kernels may read a little behind the last quantised row.
constexpr size_t slack = 4096;

// Host copies above this are shared among threads: one does not reach the speed of the memory.
constexpr size_t bytes_for_threads = size_t(16) << 20;
constexpr size_t bytes_per_piece   = size_t(4) << 20;
constexpr size_t most_threads      = 4;

constexpr llama_seq_id only_seq = 0;

double ms_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// A tensor of bytes in a new buffer of zeros, since what is masked must still be numbers.
ggml_tensor allocate(ggml_backend_buffer_type_t type, size_t size, buffer_handle & buffer) {
    buffer.reset(ggml_backend_buft_alloc_buffer(type, size + slack));
    if (buffer == nullptr) {
        throw std::runtime_error("no room for " + std::to_string(size) + " bytes of rows in " + ggml_backend_buft_name(type));
    }
    ggml_backend_buffer_clear(buffer.get(), 0);
    ggml_tensor all{};
    all.buffer = buffer.get();
    all.data   = ggml_backend_buffer_get_base(buffer.get());
    return bytes_of(&all, 0, size);
}

}  // namespace

row_store::row_store(llama_context * ctx, llama_kv_cache & cache, const row_layout & layout, uint64_t hash,
                     transfer & copies, const store_settings & settings)
    : ctx(ctx), cache(cache), layout(layout), row_bytes(layout.row_bytes()), hash(hash), copies(copies),
      n_ctx(settings.n_ctx), capacity((n_ctx + redirect::padding - 1) / redirect::padding * redirect::padding) {
    check_context();
    if (n_ctx < 1 || n_ctx > last_position || settings.n_stages < 1) {
        throw std::invalid_argument("a store of " + std::to_string(n_ctx) + " rows and " + std::to_string(settings.n_stages) +
                                    " stages cannot be made");
    }
    for (const size_t i : settings.resident) {
        if (i >= layout.k.size()) {
            throw std::invalid_argument("there is no attention layer " + std::to_string(i) + " of " +
                                        std::to_string(layout.k.size()));
        }
    }
    open(settings);
    attention = std::make_unique<redirect>(ctx, layout, copies, capacity, llama_n_ubatch(ctx),
                                           [this](size_t index) { layer_done(index); });
    truncate(only_seq, 0);
}

row_store::~row_store() {
    copies.finish();
}

void row_store::check_context() const {
    const auto refuse = [](const std::string & why) {
        throw std::runtime_error("attention of this model cannot read rows that lie elsewhere: " + why);
    };
    const llama_hparams & hparams = ctx->get_model().hparams;
    if (llama_n_seq_max(ctx) != 1) {
        refuse("there is more than one sequence");
    }
    if (layout.k.empty() || layout.k.size() != layout.v.size()) {
        refuse("keys and values are not kept apart");
    }
    if (layout.v_transposed) {
        refuse("it needs flash attention");
    }
    if (!ctx->get_cparams().causal_attn || hparams.use_alibi || hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
        refuse("tokens do not just see all that came before");
    }
    const auto & blocks = ctx->get_model().layers;
    if (std::any_of(blocks.begin(), blocks.end(), [](const llama_layer & block) { return block.rope_long != nullptr; })) {
        refuse("its positions are computed differently in a long context");
    }
    for (const auto * tensors : { &layout.k, &layout.v }) {
        for (const row_tensor & part : *tensors) {
            if (part.type == GGML_TYPE_F32) {
                refuse("keys or values have type f32");
            }
            if (ggml_backend_buffer_get_type(buffer_of(part.tensor)) !=
                ggml_backend_buffer_get_type(buffer_of(layout.k[0].tensor))) {
                refuse("its layers lie on several devices");
            }
        }
    }
}

void row_store::open(const store_settings & settings) {
    const size_t               n_layers = layout.k.size();
    const auto                 rows     = static_cast<size_t>(capacity);
    ggml_backend_buffer_type_t type     = ggml_backend_buffer_get_type(buffer_of(layout.k[0].tensor));
    ggml_backend_buffer_type_t host     = redirect::host_type_beside(type);
    size_t k_row = 0, v_row = 0;
    layers.resize(n_layers);
    for (size_t i = 0; i < n_layers; ++i) {
        layer & layer    = layers[i];
        layer.k_of_cache = layout.k[i];
        layer.v_of_cache = layout.v[i];
        layer.resident   = std::count(settings.resident.begin(), settings.resident.end(), i) > 0;
        layer.k          = allocate(layer.resident ? type : host, rows * layer.k_of_cache.row, layer.k_buffer);
        layer.v          = allocate(layer.resident ? type : host, rows * layer.v_of_cache.row, layer.v_buffer);
        if (!layer.resident) {
            layer.host_k = static_cast<uint8_t *>(layer.k.data);
            layer.host_v = static_cast<uint8_t *>(layer.v.data);
            streamed.push_back(i);
            k_row = std::max(k_row, layer.k_of_cache.row);
            v_row = std::max(v_row, layer.v_of_cache.row);
        }
    }
    stages.resize(std::min(settings.n_stages, streamed.size()));
    for (stage & stage : stages) {
        stage.k = allocate(type, rows * k_row, stage.k_buffer);
        stage.v = allocate(type, rows * v_row, stage.v_buffer);
    }
    for (layer & layer : layers) {
        places.push_back({ &layer.k, &layer.v, false });
    }
    for (size_t i = 0; i < streamed.size(); ++i) {
        places[streamed[i]] = { &stage_of(i).k, &stage_of(i).v, true };
    }
}

std::vector<row_store::layer_info> row_store::info() const {
    std::vector<layer_info> found;
    for (const layer & layer : layers) {
        const ggml_tensor * tensor = layer.k_of_cache.tensor;
        found.push_back({ (tensor->view_src != nullptr ? tensor->view_src : tensor)->name, layer.k_of_cache.row, layer.v_of_cache.row, layer.resident });
    }
    return found;
}

size_t row_store::stage_bytes() const {
    size_t sum = 0;
    for (const stage & stage : stages) {
        sum += ggml_backend_buffer_get_size(stage.k_buffer.get()) + ggml_backend_buffer_get_size(stage.v_buffer.get());
    }
    return sum;
}

size_t row_store::device_bytes() const {
    size_t sum = stage_bytes() + attention->device_bytes();
    for (const layer & layer : layers) {
        if (layer.resident) {
            sum += ggml_backend_buffer_get_size(layer.k_buffer.get()) + ggml_backend_buffer_get_size(layer.v_buffer.get());
        }
    }
    return sum;
}

size_t row_store::host_bytes() const {
    size_t sum = 0;
    for (const size_t i : streamed) {
        sum += ggml_backend_buffer_get_size(layers[i].k_buffer.get()) + ggml_backend_buffer_get_size(layers[i].v_buffer.get());
    }
    return sum;
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
    if (n > n_free()) {
        throw out_of_cells(std::to_string(n) + " rows do not fit behind " + std::to_string(n_rows) + " of " + std::to_string(n_ctx));
    }
}

int row_store::decode(const llama_batch & batch) {
    check_batch(batch);
    reserve(batch.n_tokens, false);
    n_next = n_rows + batch.n_tokens;
    if (n_rows > 1) {
        cache.seq_rm(only_seq, 0, static_cast<llama_pos>(n_rows - 1));
    }
    prepare_stages();
    attention->begin(n_rows, n_next, places);
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
    n_rows = n_next;
    return code;
}

// What was written is not counted.
void row_store::failed() {
    copies.finish();
    for (stage & stage : stages) {
        stage.n = std::min(stage.n, n_rows);
    }
    place_last();
}

void row_store::remember_exts(int64_t p0, int64_t p1) {
    if (!layout.has_ext) {
        return;
    }
    exts.resize(static_cast<size_t>(p1));
    const llama_kv_cells & cells = cache.get_cells(only_seq);
    for (uint32_t cell = 0; cell < cells.size(); ++cell) {
        if (!cells.is_empty(cell) && cells.pos_in(cell, static_cast<llama_pos>(p0), static_cast<llama_pos>(p1))) {
            exts[static_cast<size_t>(cells.pos_get(cell))] = cells.ext_get(cell);
        }
    }
}

// Of a sequence whose end is elsewhere the library gets one row, the last; its bytes are nobody's.
void row_store::place_last() {
    cache.seq_rm(only_seq, static_cast<llama_pos>(n_rows), -1);
    if (cache.seq_pos_max(only_seq) + 1 == n_rows) {
        return;
    }
    byte_writer plain;
    plain.put(uint32_t(1));  // streams
    plain.put(uint32_t(1));  // cells
    plain.put(static_cast<llama_pos>(n_rows - 1));
    plain.put(uint32_t(1));  // sequences of this cell
    if (layout.has_ext) {
        plain.put(exts[static_cast<size_t>(n_rows - 1)]);
    }
    plain.put(only_seq);
    plain.put(uint32_t(0));  // V is not transposed
    plain.put(static_cast<uint32_t>(layout.k.size()));
    for (const auto * tensors : { &layout.k, &layout.v }) {
        for (const row_tensor & part : *tensors) {
            plain.put(part.type);
            plain.put(uint64_t(part.row));
        }
    }
    stream_reader reader(plain.take());
    cache.state_read(reader, only_seq);
}

// -- streaming ---------------------------------------------------------------------------------------------------------

// The first `n` rows of the layer that `stage` holds, as far as they are not there.
void row_store::fill(stage & stage, int64_t n) {
    const layer & layer = streamed_layer(stage.holds);
    if (stage.n < n) {
        for (auto [to, row, from] : { std::tuple(&stage.k, layer.k_of_cache.row, layer.host_k),
                                      std::tuple(&stage.v, layer.v_of_cache.row, layer.host_v) }) {
            const size_t at   = static_cast<size_t>(stage.n) * row;
            const size_t size = static_cast<size_t>(n - stage.n) * row;
            copies.load({ to, at, size }, from + at);
            n_streamed += size;
        }
        stage.n      = n;
        stage.loaded = copies.progress().take();
    }
}

void row_store::wait(stage & stage) {
    const auto start = std::chrono::steady_clock::now();
    copies.progress().wait(stage.loaded);
    waited += ms_since(start);
}

// Before an evaluation: the layers that come first have the rows so far.
void row_store::prepare_stages() {
    if (stages.empty()) {
        return;
    }
    copies.load_begin();
    for (size_t i = 0; i < stages.size(); ++i) {
        if (stages[i].holds != i) {
            stages[i].holds = i;
            stages[i].n     = 0;
        }
        fill(stages[i], n_rows);
    }
    wait(stages[0]);
}

// Within an evaluation: the attention of a streamed layer has been computed. Its stage is the next one's.
void row_store::layer_done(size_t index) {
    const size_t  i     = static_cast<size_t>(std::find(streamed.begin(), streamed.end(), index) - streamed.begin());
    const layer & done  = layers[index];
    stage &       place = stage_of(i);
    for (auto [from, row, to] : { std::tuple(&place.k, done.k_of_cache.row, done.host_k),
                                  std::tuple(&place.v, done.v_of_cache.row, done.host_v) }) {
        const size_t at = static_cast<size_t>(n_rows) * row;
        copies.save({ from, at, static_cast<size_t>(n_next - n_rows) * row }, to + at);
    }
    place.n = n_next;
    home    = copies.progress().take();

    const bool   wraps = i + stages.size() >= streamed.size();
    const size_t next  = wraps ? i % stages.size() : i + stages.size();
    if (next != i) {
        place.holds = next;
        place.n     = 0;
        fill(place, wraps ? n_next : n_rows);
    }
    if (i + 1 < streamed.size()) {
        wait(stage_of(i + 1));
    }
}

double row_store::copy_rate() {
    if (stages.empty()) {
        return 0.0;
    }
    stage &      target = stages[0];
    const size_t size   = std::min(static_cast<size_t>(ggml_nbytes(&target.k)), size_t(256) << 20);
    double       best   = 0.0;
    for (int i = 0; i < 3; ++i) {
        copies.finish();
        const auto start = std::chrono::steady_clock::now();
        copies.load({ &target.k, 0, std::min(size, ggml_nbytes(&streamed_layer(0).k)) }, streamed_layer(0).host_k);
        copies.finish();
        best = std::max(best, static_cast<double>(size) / std::max(ms_since(start) / 1e3, 1e-9));
    }
    target.holds = 0;
    target.n     = 0;
    return best;
}

// -- out and in --------------------------------------------------------------------------------------------------------

size_t row_store::size(int64_t p0, int64_t p1) const {
    if (p0 < 0 || p1 <= p0 || p1 > last_position) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * row_bytes;
}

// Calls `function(layer, its row, where its rows lie on the device, or null, and on the host)` in the order of a block.
template <typename F> void row_store::each_plane(const F & function) {
    for (layer & layer : layers) {
        function(layer.k_of_cache.row, layer.resident ? &layer.k : nullptr, layer.host_k);
    }
    for (layer & layer : layers) {
        function(layer.v_of_cache.row, layer.resident ? &layer.v : nullptr, layer.host_v);
    }
}

void row_store::rows_are_home() {
    copies.progress().wait(home);
}

void row_store::save(llama_seq_id, int64_t p0, int64_t p1, uint8_t * out, size_t n_bytes) {
    const size_t needed = size(p0, p1);
    if (n_bytes != needed) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " need a buffer of " + std::to_string(needed) +
                                    " bytes, not " + std::to_string(n_bytes));
    }
    if (p1 > n_rows) {
        throw std::invalid_argument("sequence 0 holds " + std::to_string(n_rows) + " rows, not all of " + range_text(p0, p1));
    }
    write_header(out, block_kind::rows, hash, p0, p1);
    const auto n  = static_cast<size_t>(p1 - p0);
    uint8_t *  at = out + sizeof(block_header);
    if (layout.has_ext) {
        std::memcpy(at, exts.data() + p0, n * sizeof(llama_kv_cell_ext));
        at += n * sizeof(llama_kv_cell_ext);
    }
    copies.save_begin();
    std::vector<host_copy> on_host;
    each_plane([&](size_t row, ggml_tensor * device, const uint8_t * host) {
        if (device != nullptr) {
            copies.save({ device, static_cast<size_t>(p0) * row, n * row }, at);
        } else {
            on_host.push_back({ at, host + static_cast<size_t>(p0) * row, n * row });
        }
        at += n * row;
    });
    rows_are_home();
    copy_on_host(std::move(on_host));
}

void row_store::check_spans(int64_t p0, const std::vector<row_span> & spans) const {
    int64_t at = p0;
    for (const row_span & span : spans) {
        if (span.held != 0) {
            refuse();
        }
        const block_header header = read_header(span.data, span.size, block_kind::rows, hash);
        if (span.size != size(header.p0, header.p1)) {
            throw std::invalid_argument("a block of rows " + range_text(header.p0, header.p1) + " has " +
                                        std::to_string(span.size) + " bytes, not " + std::to_string(size(header.p0, header.p1)));
        }
        if (span.first != at || span.last <= span.first) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " do not follow position " + std::to_string(at));
        }
        if (span.first < header.p0 || span.last > header.p1) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " are not inside the block " +
                                        range_text(header.p0, header.p1));
        }
        at = span.last;
        const auto * exts = span.data + sizeof(block_header);
        for (int64_t row = span.first; layout.is_2d && row < span.last; ++row) {
            llama_kv_cell_ext ext;
            std::memcpy(&ext, exts + static_cast<size_t>(row - header.p0) * sizeof(ext), sizeof(ext));
            if (ext.tok < 0 || ext.x != row || ext.y != row) {
                refuse("images cannot be in this memory");
            }
        }
    }
}

void row_store::load(llama_seq_id, int64_t p0, const std::vector<row_span> & spans) {
    check_spans(p0, spans);
    if (spans.empty()) {
        return;
    }
    if (p0 != n_rows) {
        throw std::invalid_argument("sequence 0 ends at " + std::to_string(n_rows) + ", rows from " + std::to_string(p0) +
                                    " on cannot be appended");
    }
    reserve(spans.back().last - p0, false);
    rows_are_home();
    copies.load_begin();
    std::vector<host_copy> on_host;
    if (layout.has_ext) {
        exts.resize(static_cast<size_t>(spans.back().last));
    }
    for (const row_span & span : spans) {
        const block_header header = read_header(span.data, span.size, block_kind::rows, hash);
        const auto         n      = static_cast<size_t>(span.last - span.first);
        const auto         whole  = static_cast<size_t>(header.p1 - header.p0);
        const auto         skip   = static_cast<size_t>(span.first - header.p0);
        const auto         to     = static_cast<size_t>(span.first);
        const uint8_t *    at     = span.data + sizeof(block_header);
        if (layout.has_ext) {
            std::memcpy(exts.data() + to, at + skip * sizeof(llama_kv_cell_ext), n * sizeof(llama_kv_cell_ext));
            at += whole * sizeof(llama_kv_cell_ext);
        }
        each_plane([&](size_t row, ggml_tensor * device, uint8_t * host) {
            if (device != nullptr) {
                copies.load({ device, to * row, n * row }, at + skip * row);
            } else {
                on_host.push_back({ host + to * row, at + skip * row, n * row });
            }
            at += whole * row;
        });
    }
    copies.load_end();
    copy_on_host(std::move(on_host));
    n_rows = spans.back().last;
    place_last();
}

void row_store::truncate(llama_seq_id, int64_t n) {
    n_rows = std::min(n_rows, n);
    for (stage & stage : stages) {
        stage.n = std::min(stage.n, n_rows);
    }
    place_last();
}

// The library's own rows from n on are dropped by whoever asks; the one before is there since the last evaluation.
llama_pos row_store::cut(llama_seq_id seq, int64_t n) {
    if (n < n_rows) {
        truncate(seq, n);
    }
    return static_cast<llama_pos>(n);
}

void row_store::copy_on_host(std::vector<host_copy> parts) {
    size_t sum = 0;
    for (const host_copy & part : parts) {
        sum += part.size;
    }
    const size_t n_threads = sum < bytes_for_threads ? 1 : std::min<size_t>(most_threads, std::thread::hardware_concurrency());
    if (n_threads <= 1) {
        for (const host_copy & part : parts) {
            std::memcpy(part.to, part.from, part.size);
        }
        return;
    }
    std::vector<host_copy> pieces;
    for (const host_copy & part : parts) {
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
    std::vector<std::thread> threads;
    for (size_t i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
}
