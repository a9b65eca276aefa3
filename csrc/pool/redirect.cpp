#include "pool/redirect.h"

#include "library/attention.h"
#include "library/context.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

namespace {

constexpr size_t   mask_element   = 2;       // f16
constexpr size_t   mask_tile      = 64;      // kernels may read so many rows at a time, also after the last one
constexpr uint16_t hidden         = 0xfc00;  // minus infinity; visible ones are zero
constexpr size_t   pattern_bytes  = size_t(1) << 20;
constexpr int64_t  pattern_column = 1024;  // columns that are filled at a time

}  // namespace

redirect::redirect(llama_context * ctx, const row_layout & rows, transfer & copies, int64_t n_rows, int64_t n_tokens,
                   const std::vector<place> & places, std::function<void(size_t)> after)
    : ctx(ctx), copies(copies), n_rows(n_rows), n_tokens(n_tokens), after(std::move(after)),
      positions(static_cast<size_t>(n_tokens)), mask_at(static_cast<size_t>(n_tokens), 0) {
    for (size_t i = 0; i < places.size(); ++i) {
        layers.push_back({ places[i].stops });
        part_of[rows.k[i].parts[0].tensor] = { i, places[i].rows[0] };
        part_of[rows.v[i].parts[0].tensor] = { i, places[i].rows[1] };
    }
    ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(buffer_of(rows.k[0].parts[0].tensor));
    const auto                 n    = static_cast<size_t>(n_tokens);
    mask_buffer    = allocate_zeros(type, static_cast<size_t>(n_rows) * GGML_PAD(n, mask_tile) * mask_element);
    index_buffer   = allocate_zeros(type, n * sizeof(int64_t));
    pattern_buffer = allocate_zeros(host_type_beside(type), 2 * pattern_bytes);
    open_mask();
    open_output(rows, type);
    library::on_node(ctx, called, this);
}

redirect::~redirect() {
    library::on_node(ctx, nullptr, nullptr);
}

// A device that converts quantised rows puts them after the output of attention, which the library has made as large
// as its own few rows need: then the output of all layers, one after the other, goes to a place with room for all rows.
void redirect::open_output(const row_layout & rows, ggml_backend_buffer_type_t type) {
    if (ggml_backend_buft_is_host(type) && !copies.is_async()) {
        return;
    }
    size_t converted = 0;
    for (const auto * tensors : { &rows.k, &rows.v }) {
        size_t largest = 0;
        for (const row_tensor & part : *tensors) {
            const auto   kind     = static_cast<ggml_type>(part.type);
            const size_t n_values = part.row / ggml_type_size(kind) * ggml_blck_size(kind);
            largest = std::max(largest, ggml_is_quantized(kind) ? n_values * sizeof(ggml_fp16_t) * n_rows : 0);
        }
        converted += largest;
    }
    if (converted > 0) {
        const size_t output = sizeof(float) * library::attention_width(ctx) * n_tokens;
        output_buffer = allocate_zeros(type, output + converted + 4096);
    }
}

// -- the mask --------------------------------------------------------------------------------------------------------

// Row i belongs to token i of a batch: from column mask_at[i] + i + 1 on, everything is hidden.
void redirect::open_mask() {
    auto * dark = reinterpret_cast<uint16_t *>(pattern_buffer.data() + pattern_bytes);
    std::fill(dark, dark + pattern_bytes / mask_element, hidden);

    mask      = mask_buffer.bytes;
    mask.type = GGML_TYPE_F16;
    fill_mask(false, 0, n_tokens, 0, n_rows, 0);
    for (int64_t row = 0; row < n_tokens; ++row) {
        fill_mask(true, row, 1, 0, std::min(row + 1, n_rows), 0);
    }
}

// In rows [row, row + n), `width` columns: from `column` on in the first of them, and `shift` further on in each next one.
void redirect::fill_mask(bool visible, int64_t row, int64_t n, int64_t column, int64_t width, int64_t shift) {
    const uint8_t * patterns = pattern_buffer.data();
    const size_t    stride   = static_cast<size_t>(n_rows + shift) * mask_element;
    for (int64_t done = 0; done < width; done += pattern_column) {
        const size_t size = static_cast<size_t>(std::min(pattern_column, width - done)) * mask_element;
        for (int64_t i = 0; i < n;) {
            const int64_t count = std::min(static_cast<int64_t>(pattern_bytes / size), n - i);
            const auto    from  = static_cast<size_t>((row + i) * n_rows + column + i * shift + done) * mask_element;
            copies.put({ &mask_buffer.bytes, from, size, static_cast<size_t>(count), stride, size },
                       patterns + (visible ? 0 : pattern_bytes));
            i += count;
        }
    }
}

// Gives the first n rows to the tokens from position `to` on. Only changes are written: between two batches
// that is as many columns as the first one has tokens.
void redirect::move_mask(int64_t to, int64_t n) {
    for (int64_t row = 0; row < n;) {
        const int64_t at  = mask_at[row];
        int64_t       end = row;
        while (end < n && mask_at[end] == at) {
            mask_at[end++] = to;
        }
        if (at != to) {
            fill_mask(at < to, row, end - row, std::min(at, to) + row + 1, std::abs(to - at), 1);
        }
        row = end;
    }
    mask.ne[0] = GGML_PAD(to + n, padding);
    mask.ne[1] = n;
    mask.ne[2] = mask.ne[3] = 1;
    mask.nb[0]              = mask_element;
    mask.nb[1]              = static_cast<size_t>(n_rows) * mask_element;
    mask.nb[2] = mask.nb[3] = mask.nb[1] * static_cast<size_t>(n);
}

// -- one evaluation --------------------------------------------------------------------------------------------------

void redirect::begin(int64_t from, int64_t to) {
    first = from;
    last  = to;
    moved = nullptr;
    failure.clear();
    for (layer & layer : layers) {
        layer.n_written = layer.n_read = 0;
    }
    const int64_t n = last - first;
    for (int64_t i = 0; i < n; ++i) {
        positions[i] = first + i;
    }
    copies.put({ &index_buffer.bytes, 0, static_cast<size_t>(n) * sizeof(int64_t) },
               reinterpret_cast<const uint8_t *>(positions.data()));
    move_mask(first, n);
}

std::string redirect::end() {
    last = first;
    for (size_t i = 0; i < layers.size() && failure.empty(); ++i) {
        if (layers[i].n_written != 2 || layers[i].n_read != 1) {
            fail("the attention of layer " + std::to_string(i) + " was not found");
        }
    }
    for (const auto & [node, entry] : changed) {
        if (node->data == entry.data && node->src[1] == entry.source) {  // else another graph is in the same memory
            *node = entry.before;
        }
    }
    changed.clear();
    return failure;
}

bool redirect::fail(const std::string & what) {
    if (failure.empty()) {
        failure = "this llama.cpp evaluates attention in a way that is not known: " + what;
    }
    return false;
}

bool redirect::called(ggml_tensor * node, bool ask, void * self) {
    auto & redirect = *static_cast<class redirect *>(self);
    if (redirect.last == redirect.first || !redirect.failure.empty()) {
        return !ask;
    }
    // Nothing may be thrown through the library.
    try {
        if (ask) {
            return redirect.before(node);
        }
        redirect.after(redirect.stopped);
        return true;
    } catch (const std::exception & error) {
        return redirect.fail(error.what());
    }
}

// Returns whether the computation has to stop after `node`.
bool redirect::before(ggml_tensor * node) {
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        return read(node);
    }
    if (node->op == GGML_OP_SET_ROWS) {
        write(node);
    } else if (moved != nullptr && node->view_src == moved) {
        follow(node);
    }
    return false;
}

// Redirects a view of an output that was moved.
void redirect::follow(ggml_tensor * node) {
    const ggml_tensor before = *node;
    node->buffer             = moved->buffer;
    node->data               = static_cast<uint8_t *>(moved->data) + node->view_offs;
    remember(node, before);
}

// Sees to it that the output of attention, with all that a device puts after it, has room where it goes.
bool redirect::give_room(ggml_tensor * node, const ggml_tensor & before) {
    moved = nullptr;
    ggml_backend_buffer_type_t type   = ggml_backend_buffer_get_type(mask_buffer.buffer.get());
    const size_t               needed = ggml_backend_buft_get_alloc_size(type, node);
    if (output_buffer.buffer == nullptr) {
        return needed <= ggml_backend_buft_get_alloc_size(type, &before);
    }
    node->buffer = output_buffer.buffer.get();
    node->data   = output_buffer.data();
    moved        = node;
    return needed <= output_buffer.size();
}

void redirect::remember(ggml_tensor * node, const ggml_tensor & before) {
    changed.emplace(node, changed_node{ before, node->data, node->src[1] });
}

void redirect::write(ggml_tensor * node) {
    const auto found = part_of.find(node->view_src);
    if (found == part_of.end()) {
        return;
    }
    const auto [layer, to]   = found->second;
    const ggml_tensor * rows = node->src[1];
    const int64_t       n    = last - first;
    if (rows == nullptr || rows->type != GGML_TYPE_I64 || ggml_nelements(rows) != n || node->src[0]->ne[1] != n ||
        node->ne[2] != 1 || node->ne[3] != 1) {
        fail("rows of layer " + std::to_string(layer) + " are written in another shape");
        return;
    }
    const ggml_tensor before = *node;
    index          = *rows;
    index.buffer   = index_buffer.buffer.get();
    index.data     = index_buffer.data();
    index.view_src = nullptr;
    node->buffer   = to->buffer;
    node->data     = to->data;
    node->ne[1]    = n_rows;
    node->nb[2] = node->nb[3] = node->nb[1] * static_cast<size_t>(n_rows);
    node->src[1]              = &index;
    ++layers[layer].n_written;
    remember(node, before);
}

bool redirect::read(ggml_tensor * node) {
    const auto k = part_of.find(node->src[1]->view_src), v = part_of.find(node->src[2]->view_src);
    if (k == part_of.end() || v == part_of.end() || k->second.layer != v->second.layer) {
        return false;
    }
    const size_t  number = k->second.layer;
    layer &       layer  = layers[number];
    const int64_t n      = last - first;
    float         bias   = 0.0f;
    std::memcpy(&bias, node->op_params + 1, sizeof(bias));
    const ggml_tensor * hidden_part = node->src[3];
    if (hidden_part == nullptr || hidden_part->type != GGML_TYPE_F16 || hidden_part->ne[1] != n || hidden_part->ne[2] != 1 ||
        hidden_part->ne[3] != 1 || node->src[0]->ne[1] != n || node->src[1]->ne[3] != 1 || bias != 0.0f) {
        return fail("attention of layer " + std::to_string(number) + " reads in another shape");
    }
    const ggml_tensor before = *node;
    for (size_t i = 0; i < 2; ++i) {
        const ggml_tensor * rows = (i == 0 ? k : v)->second.rows;
        ggml_tensor &       view = layer.views[i];
        view          = *node->src[1 + i];
        view.buffer   = rows->buffer;
        view.data     = rows->data;
        view.view_src = nullptr;
        view.ne[1]    = mask.ne[0];
        view.nb[3]    = view.nb[1] * static_cast<size_t>(n_rows);
        node->src[1 + i] = &view;
    }
    node->src[3] = &mask;
    if (!give_room(node, before)) {
        *node = before;
        moved = nullptr;
        return fail("attention of layer " + std::to_string(number) + " needs more memory");
    }
    ++layer.n_read;
    remember(node, before);
    stopped = number;
    return layer.stops;
}
