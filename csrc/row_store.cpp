#include "row_store.h"

#include "block.h"
#include "host_copy.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr llama_seq_id only_seq = 0;

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
                                           [this](size_t index) { stages->layer_done(index, n_rows, n_next); });
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
    const auto                 rows   = static_cast<size_t>(capacity);
    ggml_backend_buffer_type_t device = ggml_backend_buffer_get_type(buffer_of(layout.k[0].tensor));
    for (size_t i = 0; i < layout.k.size(); ++i) {
        const bool resident = std::count(settings.resident.begin(), settings.resident.end(), i) > 0;
        const auto type     = resident ? device : host_type_beside(device);
        layers.push_back({ layout.k[i], layout.v[i], resident, allocate_zeros(type, rows * layout.k[i].row + row_slack),
                           allocate_zeros(type, rows * layout.v[i].row + row_slack) });
    }
    stages = std::make_unique<row_stages>(copies, layers, capacity, settings.n_stages, device);
    for (size_t i = 0; i < layers.size(); ++i) {
        const bool resident = layers[i].resident;
        places.push_back({ resident ? &layers[i].k.bytes : &stages->k_of(i).bytes,
                           resident ? &layers[i].v.bytes : &stages->v_of(i).bytes, !resident });
    }
}

std::vector<row_store::layer_info> row_store::info() const {
    std::vector<layer_info> found;
    for (const stored_layer & layer : layers) {
        const ggml_tensor * tensor = layer.k_of_cache.tensor;
        found.push_back({ (tensor->view_src != nullptr ? tensor->view_src : tensor)->name, layer.k_of_cache.row,
                          layer.v_of_cache.row, layer.resident });
    }
    return found;
}

size_t row_store::device_bytes() const {
    size_t sum = stages->bytes() + attention->device_bytes();
    for (const stored_layer & layer : layers) {
        sum += layer.resident ? layer.k.size() + layer.v.size() : 0;
    }
    return sum;
}

size_t row_store::host_bytes() const {
    size_t sum = 0;
    for (const stored_layer & layer : layers) {
        sum += layer.resident ? 0 : layer.k.size() + layer.v.size();
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
        throw out_of_cells(std::to_string(n) + " rows do not fit behind " + std::to_string(n_rows) + " of " +
                           std::to_string(n_ctx));
    }
}

int row_store::decode(const llama_batch & batch) {
    check_batch(batch);
    reserve(batch.n_tokens, false);
    n_next = n_rows + batch.n_tokens;
    if (n_rows > 1) {
        cache.seq_rm(only_seq, 0, static_cast<llama_pos>(n_rows - 1));
    }
    stages->prepare(n_rows);
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
    stages->truncate(n_rows);
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

// -- out and in --------------------------------------------------------------------------------------------------------

size_t row_store::size(int64_t p0, int64_t p1) const {
    if (p0 < 0 || p1 <= p0 || p1 > last_position) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * row_bytes;
}

// Calls `function(bytes of a row, all rows, whether they are on the device)` in the order of a block.
template <typename F> void row_store::each_plane(const F & function) {
    for (stored_layer & layer : layers) {
        function(layer.k_of_cache.row, layer.k, layer.resident);
    }
    for (stored_layer & layer : layers) {
        function(layer.v_of_cache.row, layer.v, layer.resident);
    }
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
    each_plane([&](size_t row, tensor_buffer & rows, bool on_device) {
        const size_t from = static_cast<size_t>(p0) * row;
        if (on_device) {
            copies.save({ &rows.bytes, from, n * row }, at);
        } else {
            on_host.push_back({ at, rows.data() + from, n * row });
        }
        at += n * row;
    });
    stages->wait_home();
    copy_on_host(on_host);
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
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " do not follow position " +
                                        std::to_string(at));
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
    stages->wait_home();
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
        each_plane([&](size_t row, tensor_buffer & rows, bool on_device) {
            if (on_device) {
                copies.load({ &rows.bytes, to * row, n * row }, at + skip * row);
            } else {
                on_host.push_back({ rows.data() + to * row, at + skip * row, n * row });
            }
            at += whole * row;
        });
    }
    copies.load_end();
    copy_on_host(on_host);
    n_rows = spans.back().last;
    place_last();
}

void row_store::truncate(llama_seq_id, int64_t n) {
    n_rows = std::min(n_rows, n);
    stages->truncate(n_rows);
    place_last();
}

// The library's own rows from n on are dropped by whoever asks; the one before is there since the last evaluation.
llama_pos row_store::cut(llama_seq_id seq, int64_t n) {
    if (n < n_rows) {
        truncate(seq, n);
    }
    return static_cast<llama_pos>(n);
}
