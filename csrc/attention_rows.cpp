#include "attention_rows.h"

#include "block.h"

#include "llama-kv-cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

// Rows are read into this sequence first and then handed over. It is never decoded, so it needs no recurrent cell.
constexpr llama_seq_id scratch_seq = LLAMA_MAX_SEQ - 1;

// How many rows of blocks take their cells at a time.
constexpr int64_t rows_per_step = 8192;

llama_kv_cell_ext ext_at(const uint8_t * exts, int64_t i) {
    llama_kv_cell_ext ext;
    std::memcpy(&ext, exts + i * sizeof(ext), sizeof(ext));
    return ext;
}

std::vector<std::vector<row_span>> in_steps(const std::vector<row_span> & spans) {
    std::vector<std::vector<row_span>> steps;
    int64_t                            room = 0;
    for (row_span span : spans) {
        const int64_t end = span.last;
        while (span.first < end) {
            if (steps.empty() || room == 0) {
                steps.emplace_back();
                room = rows_per_step;
            }
            // What is held is copied on the device, so fast that there is nothing to overlap.
            span.last = span.held != 0 ? end : std::min(end, span.first + room);
            steps.back().push_back(span);
            room -= span.held != 0 ? 0 : span.last - span.first;
            span.first = span.last;
        }
    }
    return steps;
}

}  // namespace

attention_rows::attention_rows(llama_kv_cache & cache, const row_layout & layout, uint64_t hash, transfer & copies,
                               bool defers)
    : cache(cache), layout(layout), row_bytes(layout.row_bytes()), hash(hash), copies(copies), held(cache.get_size()),
      positions(LLAMA_MAX_SEQ), defers(defers) {
    join_planes(layout.k);
    join_planes(layout.v);
}

// Joins tensors of one shape that lie at equal distances in one buffer.
void attention_rows::join_planes(const std::vector<row_tensor> & tensors) {
    const size_t n_cells = cache.get_size();
    for (size_t i = 0; i < tensors.size();) {
        const row_tensor & first  = tensors[i];
        const auto         at     = [&](size_t j) { return static_cast<const uint8_t *>(tensors[j].tensor->data); };
        const auto         stride = i + 1 < tensors.size() ? at(i + 1) - at(i) : 0;
        size_t             n      = 1;
        while (first.n_embd == 1 && stride > 0 && i + n < tensors.size() && tensors[i + n].row == first.row &&
               buffer_of(tensors[i + n].tensor) == buffer_of(first.tensor) && at(i + n) - at(i + n - 1) == stride) {
            ++n;
        }
        // Copies are checked against the size of the tensor, so this one has to reach to the end of the last.
        const size_t size = at(i + n - 1) - at(i) + ggml_nbytes(tensors[i + n - 1].tensor);
        plane        joined{ bytes_of(first.tensor, 0, size), first.row, n, n > 1 ? static_cast<size_t>(stride) : 0 };
        if (first.n_embd > 1) {
            joined.count  = first.n_embd;
            joined.stride = n_cells * first.row;
        }
        planes.push_back(joined);
        i += n;
    }
}

int64_t attention_rows::end_of(llama_seq_id seq) const {
    return seq == cut_seq ? cut_at : positions_of(seq).end_of(cache.seq_pos_max(seq));
}

void attention_rows::add_image(llama_seq_id seq, int64_t columns, int64_t count) {
    const auto n_cells = static_cast<int64_t>(cells().seq_pos_get(seq).size());
    if (!layout.is_2d || columns <= 0 || count <= 0 || seq == cut_seq) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " has no image there");
    }
    positions[static_cast<size_t>(seq)].add_image(cache.seq_pos_max(seq), columns, count);
    if (end_of(seq) != n_cells) {
        throw std::runtime_error("sequence " + std::to_string(seq) + " has " + std::to_string(n_cells) + " cells for " +
                                 std::to_string(end_of(seq)) + " rows");
    }
}

size_t attention_rows::size(int64_t p0, int64_t p1) const {
    if (p0 < 0 || p1 <= p0 || p1 > last_position) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * row_bytes;
}

std::vector<cell_run> attention_rows::runs_of(llama_seq_id seq, const row_positions & positions, int64_t p0, int64_t p1) const {
    const llama_kv_cells & cells = cache.get_cells(seq);
    std::vector<cell_run>  runs;
    const bool             has_images = positions.has_images();
    const auto             first = static_cast<llama_pos>(positions.position(p0));
    const auto             end   = static_cast<llama_pos>(positions.position(p1 - 1) + 1);
    int64_t                found = 0;
    for (uint32_t cell = 0; cell < cells.size() && found < p1 - p0; ++cell) {
        if (cells.is_empty(cell) || !cells.pos_in(cell, first, end) || !cells.seq_has(cell, seq)) {
            continue;
        }
        int64_t row = cells.pos_get(cell);
        if (has_images) {
            row = positions.row_of(row, cells.ext_get(cell));
            if (row < p0 || row >= p1) {
                continue;  // of the same image
            }
        }
        ++found;
        if (!runs.empty() && runs.back().cell + runs.back().count == cell && runs.back().row + runs.back().count == row) {
            ++runs.back().count;
        } else {
            runs.push_back({ cell, row, 1 });
        }
    }
    if (found != p1 - p0) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " holds " + std::to_string(found) + " of the " +
                                    std::to_string(p1 - p0) + " rows " + range_text(p0, p1));
    }
    return runs;
}

// Calls `move(region, offset in a block of rows [p0, p1))` for rows [first, last) of every plane.
template <typename F>
void attention_rows::each_region(const std::vector<cell_run> & runs, int64_t p0, int64_t p1, int64_t first, int64_t last,
                                 const F & move) {
    const size_t n  = static_cast<size_t>(p1 - p0);
    size_t       at = sizeof(block_header) + n * layout.ext_bytes();
    for (plane & plane : planes) {
        for (const cell_run & r : runs) {
            const int64_t from = std::max(r.row, first);
            const int64_t to   = std::min(r.row + r.count, last);
            if (from < to) {
                const copy_region region{ &plane.tensor, (r.cell + (from - r.row)) * plane.row, (to - from) * plane.row,
                                          plane.count,   plane.stride,                          n * plane.row };
                move(region, at + (from - p0) * plane.row);
            }
        }
        at += plane.count * n * plane.row;
    }
}

void attention_rows::check_save(int64_t p0, int64_t p1, size_t size) const {
    const size_t needed = this->size(p0, p1);
    if (size != needed) {
        throw std::invalid_argument("rows " + range_text(p0, p1) + " need a buffer of " + std::to_string(needed) +
                                    " bytes, not " + std::to_string(size));
    }
}

void attention_rows::save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    check_save(p0, p1, size);
    settle();
    const auto runs = runs_of(seq, positions_of(seq), p0, p1);
    is_reading      = true;
    write_header(out, block_kind::rows, hash, p0, p1);
    if (layout.has_ext) {
        const auto & cells = cache.get_cells(seq);
        uint8_t *    dst   = out + sizeof(block_header);
        for (const cell_run & r : runs) {
            for (int64_t i = 0; i < r.count; ++i) {
                const llama_kv_cell_ext ext = cells.ext_get(r.cell + i);
                std::memcpy(dst + (r.row + i - p0) * sizeof(ext), &ext, sizeof(ext));
            }
        }
    }
    copies.save_begin();
    each_region(runs, p0, p1, p0, p1, [&](const copy_region & region, size_t at) { copies.save(region, out + at); });
}

void attention_rows::fetch(held_rows::handle rows, int64_t p0, int64_t p1, uint8_t * out, size_t size) {
    const auto runs = held.runs_of(rows, p0, p1);
    check_save(p0, p1, size);
    write_header(out, block_kind::rows, hash, p0, p1);
    if (layout.has_ext) {
        std::memcpy(out + sizeof(block_header), held.exts_of(rows, p0), static_cast<size_t>(p1 - p0) * layout.ext_bytes());
    }
    is_reading = true;
    copies.save_begin();
    each_region(runs, p0, p1, p0, p1, [&](const copy_region & region, size_t at) { copies.save(region, out + at); });
}

void attention_rows::check_spans(int64_t p0, const std::vector<row_span> & spans) const {
    int64_t at = p0;
    for (const row_span & span : spans) {
        block_header header{};
        if (span.held == 0) {
            header = read_header(span.data, span.size, block_kind::rows, hash);
            if (span.size != size(header.p0, header.p1)) {
                throw std::invalid_argument("a block of rows " + range_text(header.p0, header.p1) + " has " +
                                            std::to_string(span.size) + " bytes, not " +
                                            std::to_string(size(header.p0, header.p1)));
            }
        }
        if (span.first != at || span.last <= span.first) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " do not follow row " +
                                        std::to_string(at));
        }
        at = span.last;
        if (span.held != 0) {
            held.runs_of(span.held, span.first, span.last);  // throws if it does not have them
        } else if (span.first < header.p0 || span.last > header.p1) {
            throw std::invalid_argument("rows " + range_text(span.first, span.last) + " are not inside the block " +
                                        range_text(header.p0, header.p1));
        }
    }
}

void attention_rows::load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) {
    check_spans(p0, spans);
    if (spans.empty()) {
        return;
    }
    if (end_of(seq) != p0) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " ends at " + std::to_string(end_of(seq)) +
                                    ", rows from " + std::to_string(p0) + " on cannot be appended");
    }
    row_positions next = appended(positions_of(seq), spans);
    if (seq != cut_seq) {
        settle();
    }
    check_free(n_needed(spans));
    changed();
    positions[static_cast<size_t>(seq)] = std::move(next);
    if (std::any_of(spans.begin(), spans.end(), [](const row_span & span) { return span.held == 0; })) {
        copies.load_begin();
    }
    // Taking cells costs the host some time per row: in steps, so that one step is copied while the next takes its cells.
    try {
        // The first rows get the cells of those that were dropped, where the library would give them these.
        const int64_t         first_new = take_over(seq, p0, spans.back().last);
        std::vector<row_span> before, after;
        for (const row_span & span : spans) {
            row_span part = span;
            part.last     = std::min(span.last, first_new);
            if (part.first < part.last) {
                before.push_back(part);
            }
            part = { span.data, span.size, std::max(span.first, first_new), span.last, span.held };
            if (part.first < part.last) {
                after.push_back(part);
            }
        }
        // Those have theirs at once: a part of them would find no use for cells of the others that what is held leaves.
        if (!before.empty()) {
            append(seq, before, true);
        }
        for (const std::vector<row_span> & step : in_steps(after)) {
            append(seq, step, false);
        }
    } catch (...) {
        copies.finish();
        cache.seq_rm(scratch_seq, -1, -1);
        settle();
        cache.seq_rm(seq, static_cast<llama_pos>(position(seq, p0)), -1);  // the image, too, where p0 is inside of one
        positions[static_cast<size_t>(seq)].truncate(positions_of(seq).end_of(cache.seq_pos_max(seq)));
        fence();
        changed();
        throw;
    }
    copies.load_end();
}

void attention_rows::truncate(llama_seq_id seq, int64_t n) {
    if (n >= end_of(seq)) {
        positions[static_cast<size_t>(seq)].truncate(n);  // whatever else has emptied it
        return;
    }
    if (positions_of(seq).is_inside(n)) {
        throw std::invalid_argument("row " + std::to_string(n) + " is inside an image");
    }
    if (seq != cut_seq) {
        settle();
    }
    cut_seq = seq;
    cut_at  = n;
    cut_pos = position(seq, n);
    positions[static_cast<size_t>(seq)].truncate(n);
    if (!defers) {
        settle();
    }
    fence();
    changed();
}

void attention_rows::settle() {
    if (cut_seq >= 0) {
        cache.seq_rm(cut_seq, static_cast<llama_pos>(cut_pos), -1);
        cut_seq = -1;
        changed();
    }
}

llama_pos attention_rows::cut(llama_seq_id seq, int64_t n) {
    if (positions_of(seq).is_inside(n)) {
        return -1;
    }
    const int64_t pos = position(seq, n);
    settle();
    changed();
    positions[static_cast<size_t>(seq)].truncate(n);
    return static_cast<llama_pos>(pos);
}

// What is computed next may overwrite cells that were given up.
void attention_rows::fence() {
    if (is_reading) {
        copies.load_end();
        is_reading = false;
    }
}

// Gives rows [p0, last) of `seq`, which were dropped but are not settled, to those that are loaded: as many as lie in
// the lowest vacant cells one after the other, which are what the library would choose, and are text before and after.
// The rest is settled. Returns the first row that needs a cell.
int64_t attention_rows::take_over(llama_seq_id seq, int64_t p0, int64_t last) {
    if (cut_seq != seq) {
        return p0;
    }
    const llama_kv_cells & cells = this->cells();
    // One row of them is dropped at least: then the library looks for the next cells from its on.
    const int64_t shift = p0 - cut_pos;
    const int64_t end   = std::min({ last, cache.seq_pos_max(seq) + shift, positions_of(seq).next_image(p0) });
    int64_t       next  = p0;
    for (uint32_t cell = 0; cell < cells.size() && next < end; ++cell) {
        if (is_vacant(cell)) {
            if (cells.is_empty(cell) || cells.pos_get(cell) + shift != next) {
                settle();
                return p0;
            }
            if (layout.is_2d && cells.ext_get(cell).tok < 0) {
                break;  // an image was there
            }
            ++next;
        }
    }
    cut_at  = next;
    cut_pos = next - shift;
    settle();
    return next;
}

// What the library knows of the rows of `span`, one llama_kv_cell_ext after the other, unless there is no such thing.
const uint8_t * attention_rows::exts_of(const row_span & span) const {
    if (!layout.has_ext) {
        return nullptr;
    }
    if (span.held != 0) {
        return reinterpret_cast<const uint8_t *>(held.exts_of(span.held, span.first));
    }
    const block_header header = read_header(span.data, span.size, block_kind::rows, hash);
    return span.data + sizeof(block_header) + static_cast<size_t>(span.first - header.p0) * layout.ext_bytes();
}

// Where the rows are when those of `spans` follow them.
row_positions attention_rows::appended(const row_positions & before, const std::vector<row_span> & spans) const {
    row_positions after = before;
    for (const row_span & span : spans) {
        const uint8_t * exts = layout.is_2d ? exts_of(span) : nullptr;
        for (int64_t row = span.first; exts != nullptr && row < span.last; ++row) {
            if (!after.append(row, ext_at(exts, row - span.first))) {
                throw std::invalid_argument("row " + std::to_string(row) + " of the block cannot follow the one before it");
            }
        }
    }
    return after;
}

// Cells that were taken over keep their positions; what else the library knows of a row is that of the new one.
void attention_rows::write_exts(const std::vector<cell_run> & runs, const std::vector<row_span> & spans) {
    if (!layout.has_ext) {
        return;
    }
    auto & cells = const_cast<llama_kv_cells &>(this->cells());
    for (const row_span & span : spans) {
        const uint8_t * exts = exts_of(span);
        for (const cell_run & run : runs) {
            for (int64_t row = std::max(span.first, run.row); row < std::min(span.last, run.row + run.count); ++row) {
                cells.ext_set(static_cast<uint32_t>(run.cell + (row - run.row)), ext_at(exts, row - span.first));
            }
        }
    }
}

// Appends the rows of `spans`, which follow those that `seq` holds, or take over its last cells.
void attention_rows::append(llama_seq_id seq, const std::vector<row_span> & spans, bool has_cells) {
    // The library reads whole sequences only. An empty one can be read in place; others take over from the scratch one.
    const int64_t      p0     = spans.front().first;
    const llama_seq_id target = p0 == 0 || has_cells ? seq : scratch_seq;
    if (!has_cells) {
        claim_cells(target, positions_of(seq), spans);
    }
    const auto runs = runs_of(target, positions_of(seq), p0, spans.back().last);
    if (has_cells) {
        write_exts(runs, spans);
    }
    fill(runs, spans);
    for (const row_span & span : spans) {
        if (span.held != 0) {
            continue;
        }
        const block_header header = read_header(span.data, span.size, block_kind::rows, hash);
        each_region(runs, header.p0, header.p1, span.first, span.last,
                    [&](const copy_region & region, size_t at) { copies.load(region, span.data + at); });
    }
    if (target == scratch_seq) {
        cache.seq_cp(scratch_seq, seq, -1, -1);
        cache.seq_rm(scratch_seq, -1, -1);
    }
}

// Lets the library find cells for the spans' rows: it reads metadata of our own making and no data.
void attention_rows::claim_cells(llama_seq_id seq, const row_positions & positions, const std::vector<row_span> & spans) {
    uint32_t n_cells = 0;
    for (const row_span & span : spans) {
        n_cells += static_cast<uint32_t>(span.last - span.first);
    }
    byte_writer plain;
    plain.reserve(n_cells * (sizeof(llama_pos) + 2 * sizeof(uint32_t) + sizeof(llama_kv_cell_ext)) + 4096);
    plain.put(uint32_t(1));  // streams
    plain.put(n_cells);
    for (const row_span & span : spans) {
        const uint8_t * exts = exts_of(span);
        for (int64_t row = span.first; row < span.last; ++row) {
            plain.put(static_cast<llama_pos>(positions.position(row)));
            plain.put(uint32_t(1));  // sequences of this cell
            if (layout.has_ext) {
                plain.put(ext_at(exts, row - span.first));
            }
            plain.put(seq);
        }
    }
    plain.put(uint32_t(layout.v_transposed ? 1 : 0));
    plain.put(static_cast<uint32_t>(layout.k.size()));
    for (const row_tensor & part : layout.k) {
        plain.put(part.type);
        plain.put(uint64_t(part.row));
    }
    for (const row_tensor & part : layout.v) {
        plain.put(part.type);
        if (layout.v_transposed) {
            plain.put(uint32_t(part.row));
            plain.put(uint32_t(part.n_embd));
        } else {
            plain.put(uint64_t(part.row));
        }
    }
    stream_reader reader(plain.take());
    cache.state_read(reader, seq);
}
