#include "kv_state.h"

#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <stdexcept>

namespace {

// Rows are read into this sequence first and then handed over. It is never decoded, so it needs no recurrent cell.
constexpr llama_seq_id scratch_seq = LLAMA_MAX_SEQ - 1;

constexpr uint32_t format_version = 1;

uint64_t fnv1a(const std::string & text) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char c : text) {
        hash = (hash ^ c) * 0x100000001b3ull;
    }
    return hash;
}

// How many rows take their cells at a time.
constexpr int64_t rows_per_step = 8192;

std::vector<std::vector<row_span>> in_steps(const std::vector<row_span> & spans) {
    std::vector<std::vector<row_span>> steps;
    int64_t                            room = 0;
    for (row_span span : spans) {
        const int64_t end = span.last;
        while (span.first < end) {
            if (room == 0) {
                steps.emplace_back();
                room = rows_per_step;
            }
            span.last = std::min(end, span.first + room);
            steps.back().push_back(span);
            room -= span.last - span.first;
            span.first = span.last;
        }
    }
    return steps;
}

std::string range_text(int64_t p0, int64_t p1) {
    return "[" + std::to_string(p0) + ", " + std::to_string(p1) + ")";
}

}  // namespace

kv_state::kv_state(llama_context * context, llama_seq_id seq) : ctx(context) {
    if (ctx == nullptr) {
        throw std::invalid_argument("the context is null");
    }
    llama_memory_t memory = llama_get_memory(ctx);
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        attn  = hybrid->get_mem_attn();
        recr  = hybrid->get_mem_recr();
        kind_ = memory_kind::hybrid;
    } else if (auto * cache = dynamic_cast<llama_kv_cache *>(memory)) {
        attn  = cache;
        kind_ = memory_kind::attention;
    }
    check_seq(seq);
    // With one stream per sequence, rows cannot be handed from the scratch sequence to another one.
    if (attn != nullptr && attn->get_n_stream() != 1) {
        attn  = nullptr;
        recr  = nullptr;
        kind_ = memory_kind::whole;
    }
    if (attn != nullptr) {
        if (attn->seq_pos_max(seq) < 0) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " is empty: evaluate one token first");
        }
        discover_attention(seq);
    }
    if (recr != nullptr) {
        discover_recurrent(seq);
    }
    const char * names[] = { "attention", "hybrid", "whole" };
    description          = std::string(names[static_cast<int>(kind_)]) + " ext=" + (has_ext ? "1" : "0") +
                  " transposed=" + (v_trans ? "1" : "0");
    for (const auto * parts : { &k_parts, &v_parts }) {
        description += parts == &k_parts ? " k=" : " v=";
        for (const row_part & part : *parts) {
            description += std::to_string(part.type) + ":" + std::to_string(part.row) + "x" + std::to_string(part.n_embd) + ",";
        }
    }
    description += " state=";
    for (const io_step & step : recurrent_steps) {
        if (step.tensor != nullptr) {
            description += std::to_string(step.size) + ",";
        }
    }
    layout_hash = fnv1a(description);

    std::vector<ggml_tensor *> tensors;
    for (const auto * parts : { &k_parts, &v_parts }) {
        plan_planes(*parts);
        for (const row_part & part : *parts) {
            tensors.push_back(part.tensor);
        }
    }
    for (const io_step & step : recurrent_steps) {
        if (step.tensor != nullptr) {
            tensors.push_back(step.tensor);
        }
    }
    copies = std::make_unique<transfer>(ctx, tensors, recurrent_bytes);
}

// Joins parts of one shape whose tensors lie at equal distances in one buffer.
void kv_state::plan_planes(const std::vector<row_part> & parts) {
    const size_t n_ctx = parts.empty() ? 0 : attn->get_size();
    for (size_t i = 0; i < parts.size();) {
        const row_part & first  = parts[i];
        const auto       at     = [&](size_t j) { return static_cast<const uint8_t *>(parts[j].tensor->data); };
        const auto       stride = i + 1 < parts.size() ? at(i + 1) - at(i) : 0;
        size_t           n      = 1;
        while (first.n_embd == 1 && stride > 0 && i + n < parts.size() && parts[i + n].row == first.row &&
               buffer_of(parts[i + n].tensor) == buffer_of(first.tensor) && at(i + n) - at(i + n - 1) == stride) {
            ++n;
        }
        // Copies are checked against the size of the tensor, so this one has to reach to the end of the last.
        const size_t size = at(i + n - 1) - at(i) + ggml_nbytes(parts[i + n - 1].tensor);
        row_plane    plane{ bytes_of(first.tensor, 0, size), first.row, n, n > 1 ? static_cast<size_t>(stride) : 0 };
        if (first.n_embd > 1) {
            plane.count  = first.n_embd;
            plane.stride = n_ctx * first.row;
        }
        planes.push_back(plane);
        i += n;
    }
}

void kv_state::discover_attention(llama_seq_id seq) {
    llama_synchronize(ctx);
    recorder stream;
    attn->state_write(stream, seq);

    has_ext = attn->has_cell_ext();
    size_t       at      = 1;  // past the number of streams
    const auto & steps   = stream.steps;
    const auto   n_cells = value_of<uint32_t>(steps.at(at++));
    at += n_cells * (has_ext ? 4 : 3);
    v_trans             = value_of<uint32_t>(steps.at(at++)) != 0;
    const auto n_layers = value_of<uint32_t>(steps.at(at++));

    const auto skip_tensors = [&](size_t expected) {
        size_t sum = 0;
        ggml_tensor * tensor = steps.at(at).tensor;
        while (at < steps.size() && steps[at].tensor != nullptr) {
            sum += steps[at++].size;
        }
        if (sum != expected) {
            throw std::runtime_error("llama.cpp wrote attention rows of an unknown shape");
        }
        return tensor;
    };
    for (uint32_t i = 0; i < n_layers; ++i) {
        row_part part{ nullptr, value_of<int32_t>(steps.at(at)), value_of<uint64_t>(steps.at(at + 1)), 1 };
        at += 2;
        part.tensor = skip_tensors(n_cells * part.row);
        k_parts.push_back(part);
    }
    while (at < steps.size()) {
        row_part part{ nullptr, value_of<int32_t>(steps.at(at)), 0, 1 };
        if (v_trans) {
            part.row    = value_of<uint32_t>(steps.at(at + 1));
            part.n_embd = value_of<uint32_t>(steps.at(at + 2));
            at += 3;
        } else {
            part.row = value_of<uint64_t>(steps.at(at + 1));
            at += 2;
        }
        part.tensor = skip_tensors(n_cells * part.per_token());
        v_parts.push_back(part);
    }
    bytes_per_row = has_ext ? sizeof(llama_kv_cell_ext) : 0;
    for (const auto * parts : { &k_parts, &v_parts }) {
        for (const row_part & part : *parts) {
            bytes_per_row += part.per_token();
        }
    }
}

void kv_state::discover_recurrent(llama_seq_id seq) {
    recorder stream;
    recr->state_write(stream, seq);
    recurrent_steps = std::move(stream.steps);
    if (recurrent_steps.size() < 3 || value_of<uint32_t>(recurrent_steps[0]) != 1) {
        throw std::runtime_error("llama.cpp wrote a recurrent state of an unknown shape");
    }
    for (io_step & step : recurrent_steps) {
        recurrent_bytes += step.tensor != nullptr ? step.size : 0;
    }
}

void kv_state::check_seq(llama_seq_id seq) const {
    const auto n_seqs = static_cast<llama_seq_id>(llama_n_seq_max(ctx));
    if (seq < 0 || seq >= n_seqs) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " is not in [0, " + std::to_string(n_seqs) + ")");
    }
}

void kv_state::check_rows() const {
    if (attn == nullptr) {
        throw std::invalid_argument("this model's memory has no rows that could be moved on their own");
    }
}

int64_t kv_state::n_rows(llama_seq_id seq) const {
    check_seq(seq);
    return (attn != nullptr ? attn->seq_pos_max(seq) : llama_memory_seq_pos_max(llama_get_memory(ctx), seq)) + 1;
}

std::vector<kv_state::run> kv_state::runs_of(llama_seq_id seq, int64_t p0, int64_t p1) const {
    const llama_kv_cells & cells = attn->get_cells(seq);
    std::vector<run>       runs;
    int64_t                found = 0;
    for (uint32_t cell = 0; cell < cells.size() && found < p1 - p0; ++cell) {
        if (cells.is_empty(cell) || !cells.pos_in(cell, p0, p1) || !cells.seq_has(cell, seq)) {
            continue;
        }
        const int64_t pos = cells.pos_get(cell);
        ++found;
        if (!runs.empty() && runs.back().cell + runs.back().count == cell && runs.back().pos + runs.back().count == pos) {
            ++runs.back().count;
        } else {
            runs.push_back({ cell, pos, 1 });
        }
    }
    if (found != p1 - p0) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " holds " + std::to_string(found) + " of the " +
                                    std::to_string(p1 - p0) + " rows " + range_text(p0, p1));
    }
    return runs;
}

bool kv_state::ordered(llama_seq_id seq) const {
    check_seq(seq);
    check_rows();
    const int64_t n    = n_rows(seq);
    const auto    runs = runs_of(seq, 0, n);
    return n == 0 || (runs.size() == 1 && runs[0].cell == 0 && runs[0].pos == 0);
}

void kv_state::put_header(uint8_t * out, const char * magic, int64_t p0, int64_t p1) const {
    block_header header{};
    std::memcpy(header.magic, magic, sizeof(header.magic));
    header.version = format_version;
    header.layout  = layout_hash;
    header.p0      = p0;
    header.p1      = p1;
    std::memcpy(out, &header, sizeof(header));
}

block_header kv_state::get_header(const uint8_t * data, size_t size, const char * magic) const {
    block_header header{};
    if (size < sizeof(header)) {
        throw std::invalid_argument("a block of " + std::to_string(size) + " bytes is shorter than its header");
    }
    std::memcpy(&header, data, sizeof(header));
    if (std::memcmp(header.magic, magic, sizeof(header.magic)) != 0 || header.version != format_version) {
        throw std::invalid_argument(std::string("these bytes are not a block of kind ") + magic);
    }
    if (header.layout != layout_hash) {
        throw std::invalid_argument("the block was taken from a model or cache of another layout");
    }
    if (header.p0 < 0 || header.p1 < header.p0) {
        throw std::invalid_argument("the block claims positions " + range_text(header.p0, header.p1));
    }
    return header;
}

size_t kv_state::rows_size(int64_t p0, int64_t p1) const {
    check_rows();
    if (p0 < 0 || p1 <= p0) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * bytes_per_row;
}

void kv_state::save_rows(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    check_seq(seq);
    if (size != rows_size(p0, p1)) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " need a buffer of " +
                                    std::to_string(rows_size(p0, p1)) + " bytes, not " + std::to_string(size));
    }
    const auto runs = runs_of(seq, p0, p1);
    put_header(out, "ROWS", p0, p1);

    if (has_ext) {
        const auto & cells = attn->get_cells(seq);
        uint8_t *    dst   = out + sizeof(block_header);
        for (const run & r : runs) {
            for (int64_t i = 0; i < r.count; ++i) {
                const llama_kv_cell_ext ext = cells.ext_get(r.cell + i);
                std::memcpy(dst + (r.pos + i - p0) * sizeof(ext), &ext, sizeof(ext));
            }
        }
    }
    copies->save_begin();
    each_region(runs, p0, p1, p0, p1, [&](const copy_region & s, size_t at) { copies->save(s, out + at); });
}

// Calls `move(copy_region, offset in a block of rows [p0, p1))` for positions [first, last) of every plane.
template <typename F>
void kv_state::each_region(const std::vector<run> & runs, int64_t p0, int64_t p1, int64_t first, int64_t last,
                          const F & move) {
    const size_t n  = static_cast<size_t>(p1 - p0);
    size_t       at = sizeof(block_header) + (has_ext ? n * sizeof(llama_kv_cell_ext) : 0);
    for (row_plane & plane : planes) {
        for (const run & r : runs) {
            const int64_t from = std::max(r.pos, first);
            const int64_t to   = std::min(r.pos + r.count, last);
            if (from < to) {
                copy_region s{ &plane.tensor, (r.cell + (from - r.pos)) * plane.row,
                         (to - from) * plane.row, plane.count, plane.stride, n * plane.row };
                move(s, at + (from - p0) * plane.row);
            }
        }
        at += plane.count * n * plane.row;
    }
}

void kv_state::load_rows(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) {
    check_seq(seq);
    check_rows();
    int64_t at = p0;
    for (const row_span & span : spans) {
        const block_header header = get_header(span.data, span.size, "ROWS");
        if (span.size != rows_size(header.p0, header.p1)) {
            throw std::invalid_argument("a block of rows " + range_text(header.p0, header.p1) + " has " +
                                        std::to_string(span.size) + " bytes, not " +
                                        std::to_string(rows_size(header.p0, header.p1)));
        }
        if (span.first != at || span.last <= span.first) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " do not follow position " + std::to_string(at));
        }
        if (span.first < header.p0 || span.last > header.p1) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " are not inside the block " +
                                        range_text(header.p0, header.p1));
        }
        at = span.last;
    }
    if (at == p0) {
        return;
    }
    if (n_rows(seq) != p0) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " ends at " + std::to_string(n_rows(seq)) +
                                    ", rows from " + std::to_string(p0) + " on cannot be appended");
    }
    if (at > static_cast<int64_t>(attn->get_size())) {
        throw std::invalid_argument(std::to_string(at) + " rows do not fit a context of " + std::to_string(attn->get_size()));
    }
    copies->load_begin();
    // Taking cells costs the host some time per row: in steps, so that one step is copied while the next takes its cells.
    try {
        for (const std::vector<row_span> & step : in_steps(spans)) {
            append_rows(seq, step);
        }
    } catch (...) {
        finish();
        attn->seq_rm(seq, static_cast<llama_pos>(p0), -1);
        throw;
    }
    copies->load_end();
}

// Appends the rows of `spans`, which follow those that `seq` holds.
void kv_state::append_rows(llama_seq_id seq, const std::vector<row_span> & spans) {
    // The library reads whole sequences only. An empty one can be read in place; others take over from the scratch one.
    const int64_t      p0     = spans.front().first;
    const llama_seq_id target = p0 == 0 ? seq : scratch_seq;
    claim_cells(target, spans);
    const auto runs = runs_of(target, p0, spans.back().last);
    for (const row_span & span : spans) {
        const block_header header = get_header(span.data, span.size, "ROWS");
        each_region(runs, header.p0, header.p1, span.first, span.last,
                   [&](const copy_region & s, size_t offset) { copies->load(s, span.data + offset); });
    }
    if (target == scratch_seq) {
        attn->seq_cp(scratch_seq, seq, -1, -1);
        attn->seq_rm(scratch_seq, -1, -1);
    }
}

// Lets the library find cells for the spans' positions: it reads metadata of our own making and no data.
void kv_state::claim_cells(llama_seq_id seq, const std::vector<row_span> & spans) {
    std::vector<uint8_t> plain;
    uint32_t             n_cells = 0;
    for (const row_span & span : spans) {
        n_cells += static_cast<uint32_t>(span.last - span.first);
    }
    plain.reserve(n_cells * (sizeof(llama_pos) + 2 * sizeof(uint32_t) + sizeof(llama_kv_cell_ext)) + 4096);
    append(plain, uint32_t(1));
    append(plain, n_cells);
    for (const row_span & span : spans) {
        const block_header header = get_header(span.data, span.size, "ROWS");
        for (int64_t pos = span.first; pos < span.last; ++pos) {
            append(plain, static_cast<llama_pos>(pos));
            append(plain, uint32_t(1));
            if (has_ext) {
                llama_kv_cell_ext ext;
                std::memcpy(&ext, span.data + sizeof(block_header) + (pos - header.p0) * sizeof(ext), sizeof(ext));
                append(plain, ext);
            }
            append(plain, seq);
        }
    }
    append(plain, uint32_t(v_trans ? 1 : 0));
    append(plain, static_cast<uint32_t>(k_parts.size()));
    for (const row_part & part : k_parts) {
        append(plain, part.type);
        append(plain, uint64_t(part.row));
    }
    for (const row_part & part : v_parts) {
        append(plain, part.type);
        if (v_trans) {
            append(plain, uint32_t(part.row));
            append(plain, uint32_t(part.n_embd));
        } else {
            append(plain, uint64_t(part.row));
        }
    }
    stream_reader reader(std::move(plain), nullptr, nullptr, 0);
    attn->state_read(reader, seq);
}

size_t kv_state::state_size(llama_seq_id seq) const {
    check_seq(seq);
    switch (kind_) {
        case memory_kind::attention: return 0;
        case memory_kind::hybrid:    return sizeof(block_header) + recurrent_bytes;
        case memory_kind::whole:     break;
    }
    return sizeof(block_header) + llama_state_seq_get_size(ctx, seq);
}

void kv_state::save_state(llama_seq_id seq, int64_t n, uint8_t * out, size_t size) {
    check_seq(seq);
    if (kind_ == memory_kind::attention) {
        throw std::invalid_argument("this model has no state besides its rows");
    }
    const llama_pos pos = llama_memory_seq_pos_max(llama_get_memory(ctx), seq);
    const llama_pos at  = recr != nullptr ? recr->seq_pos_max(seq) : pos;
    if (n <= 0 || at + 1 != n || n_rows(seq) != n) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " stands at " + std::to_string(at + 1) +
                                    ", its state at " + std::to_string(n) + " cannot be saved");
    }
    if (size != state_size(seq)) {
        throw std::invalid_argument("the state needs a buffer of " + std::to_string(state_size(seq)) + " bytes, not " + std::to_string(size));
    }
    if (recr != nullptr) {
        recorder stream;
        recr->state_write(stream, seq);
        std::vector<copy_region> regions;
        size_t             n_bytes = 0;
        for (const io_step & step : stream.steps) {
            if (step.tensor != nullptr) {
                regions.push_back({ step.tensor, step.offset, step.size });
                n_bytes += step.size;
            }
        }
        if (n_bytes != recurrent_bytes) {
            throw std::runtime_error("llama.cpp wrote another amount of recurrent state than before");
        }
        copies->save_staged(regions, out + sizeof(block_header));
    } else {
        llama_synchronize(ctx);
        if (llama_state_seq_get_data(ctx, out + sizeof(block_header), size - sizeof(block_header), seq) == 0) {
            throw std::runtime_error("llama.cpp could not write the state of the sequence");
        }
    }
    put_header(out, "STAT", 0, n);
}

void kv_state::load_state(llama_seq_id seq, int64_t n, const uint8_t * data, size_t size) {
    check_seq(seq);
    if (kind_ == memory_kind::attention) {
        throw std::invalid_argument("this model has no state besides its rows");
    }
    const block_header header = get_header(data, size, "STAT");
    if (header.p1 != n || n <= 0) {
        throw std::invalid_argument("the state belongs to position " + std::to_string(header.p1) + ", not " + std::to_string(n));
    }
    if (recr != nullptr) {
        if (size != sizeof(block_header) + recurrent_bytes) {
            throw std::invalid_argument("a state has " + std::to_string(sizeof(block_header) + recurrent_bytes) + " bytes, not " + std::to_string(size));
        }
        if (n_rows(seq) != n) {
            throw std::invalid_argument("sequence " + std::to_string(seq) + " holds " + std::to_string(n_rows(seq)) +
                                        " rows, a state at " + std::to_string(n) + " does not belong there");
        }
        std::vector<uint8_t> plain;
        for (size_t i = 0; i < recurrent_steps.size(); ++i) {
            const io_step & step = recurrent_steps[i];
            if (step.tensor != nullptr) {
                continue;
            }
            if (i == 1) {  // after the cell count comes the position of the cell's last token
                append(plain, static_cast<llama_pos>(n - 1));
            } else {
                plain.insert(plain.end(), step.bytes.begin(), step.bytes.end());
            }
        }
        copies->load_begin();
        stream_reader reader(std::move(plain), copies.get(), data + sizeof(block_header), recurrent_bytes);
        recr->state_read(reader, seq);
        copies->load_end();
        return;
    }
    llama_synchronize(ctx);
    if (llama_state_seq_set_data(ctx, data + sizeof(block_header), size - sizeof(block_header), seq) == 0) {
        clear(seq);
        throw std::invalid_argument("llama.cpp refused the state");
    }
    if (n_rows(seq) != n) {
        clear(seq);
        throw std::invalid_argument("the state restored to another position than it was saved at");
    }
}

void kv_state::rewind(llama_seq_id seq, int64_t n) {
    check_seq(seq);
    if (n < 0 || n > n_rows(seq)) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " ends at " + std::to_string(n_rows(seq)) +
                                    ", it cannot be rewound to " + std::to_string(n));
    }
    if (n == 0) {
        clear(seq);
        return;
    }
    check_rows();
    finish();  // cells that are given up may be filled again
    attn->seq_rm(seq, static_cast<llama_pos>(n), -1);
}

void kv_state::clear(llama_seq_id seq) {
    check_seq(seq);
    finish();
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
}
