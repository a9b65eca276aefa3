#include "core/row_memory.h"

#include <cstring>
#include <memory>

size_t row_memory::size(int64_t p0, int64_t p1) const {
    if (p0 < 0 || p1 <= p0 || p1 > last_position) {
        refuse("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * layout.row_bytes();
}

int64_t row_memory::check_load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const {
    int64_t at = p0;
    for (const row_span & span : spans) {
        block_header header{};
        if (span.held == 0) {
            header = read_header(span.data, span.size, rows_block, hash);
            if (span.size != size(header.p0, header.p1)) {
                refuse("a block of rows " + range_text(header.p0, header.p1) + " has " + std::to_string(span.size) +
                       " bytes, not " + std::to_string(size(header.p0, header.p1)));
            }
        }
        if (span.first != at || span.last <= span.first) {
            refuse("rows " + range_text(span.first, span.last) + " do not follow row " + std::to_string(at));
        }
        at = span.last;
        if (span.held != 0) {
            held.runs_of(span.held, span.first, span.last);  // throws if it does not have them
        } else if (span.first < header.p0 || span.last > header.p1) {
            refuse("rows " + range_text(span.first, span.last) + " are not inside the block " +
                   range_text(header.p0, header.p1));
        }
    }
    if (!spans.empty() && end_of(seq) != p0) {
        refuse("sequence " + std::to_string(seq) + " ends at " + std::to_string(end_of(seq)) + ", rows from " +
               std::to_string(p0) + " on cannot be appended");
    }
    return position_after(seq, p0, spans);
}

std::vector<cell_extra> row_memory::exts_of(const std::vector<row_span> & spans) const {
    std::vector<cell_extra> exts;
    for (size_t i = 0; i < spans.size() && layout.has_ext; ++i) {
        const row_span & span = spans[i];
        const auto       n    = static_cast<size_t>(span.last - span.first);
        exts.resize(exts.size() + n);
        if (span.held != 0) {
            std::memcpy(&exts[exts.size() - n], held.exts_of(span.held, span.first), n * layout.ext_bytes());
        } else {
            const int64_t skip = span.first - read_header(span.data, span.size, rows_block, hash).p0;
            std::memcpy(&exts[exts.size() - n], span.data + sizeof(block_header) + skip * layout.ext_bytes(), n * layout.ext_bytes());
        }
    }
    return exts;
}

void row_memory::fetch(held_rows::handle rows, int64_t p0, int64_t p1, uint8_t * out, size_t n_bytes) {
    const auto runs = held.runs_of(rows, p0, p1);
    if (n_bytes != size(p0, p1)) {
        refuse("rows " + range_text(p0, p1) + " need a buffer of " + std::to_string(size(p0, p1)) + " bytes, not " +
               std::to_string(n_bytes));
    }
    const size_t n_exts = static_cast<size_t>(p1 - p0) * layout.ext_bytes();
    write_header(out, rows_block, hash, p0, p1);
    if (n_exts > 0) {
        std::memcpy(out + sizeof(block_header), held.exts_of(rows, p0), n_exts);
    }
    is_reading = true;
    copies.save_begin();
    copy_out(runs, p0, p1, out + sizeof(block_header) + n_exts);
}

void row_memory::save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t n_bytes) {
    const held_rows::handle rows = hold(seq, p0, p1);
    // Not by `release`: the sequence has the cells, and nothing waits for the copies.
    const std::shared_ptr<void> after(nullptr, [&](void *) { held.release(rows); });
    fetch(rows, p0, p1, out, n_bytes);
}

int64_t row_memory::n_own(held_rows::handle rows, int64_t p0, int64_t p1) const {
    int64_t n = 0;
    for (const cell_run & run : held.has(rows) ? held.runs_of(rows, p0, p1) : std::vector<cell_run>()) {
        for (int64_t cell = run.cell; cell < run.cell + run.count; ++cell) {
            n += is_vacant(cell) && held.count(cell) == 1;
        }
    }
    return n;
}

void row_memory::release(held_rows::handle rows) {
    if (held.has(rows)) {
        const auto [p0, p1] = held.range_of(rows);
        n_only_held         = n_held() - n_own(rows, p0, p1);
        held.release(rows);
        fence();
    }
}

void row_memory::fence() {
    if (is_reading) {
        copies.load_end();
        is_reading = false;
    }
}
