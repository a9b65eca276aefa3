#include "core/row_memory.h"

#include <cstring>

size_t row_memory::size(int64_t p0, int64_t p1) const {
    if (p0 < 0 || p1 <= p0 || p1 > last_position) {
        refuse("rows " + range_text(p0, p1) + " are not a range");
    }
    return sizeof(block_header) + static_cast<size_t>(p1 - p0) * row_bytes;
}

void row_memory::check_size(int64_t p0, int64_t p1, size_t n_bytes) const {
    if (n_bytes != size(p0, p1)) {
        refuse("rows " + range_text(p0, p1) + " need a buffer of " + std::to_string(size(p0, p1)) + " bytes, not " +
               std::to_string(n_bytes));
    }
}

void row_memory::check_spans(int64_t p0, const std::vector<row_span> & spans) const {
    int64_t at = p0;
    for (const row_span & span : spans) {
        block_header header{};
        if (span.held == 0) {
            header = read_header(span.data, span.size, block_kind::rows, hash);
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
}

const uint8_t * row_memory::exts_of(const row_span & span) const {
    if (!layout.has_ext) {
        return nullptr;
    }
    if (span.held != 0) {
        return reinterpret_cast<const uint8_t *>(held.exts_of(span.held, span.first));
    }
    const block_header header = read_header(span.data, span.size, block_kind::rows, hash);
    return span.data + sizeof(block_header) + static_cast<size_t>(span.first - header.p0) * layout.ext_bytes();
}

uint8_t * row_memory::begin_block(int64_t p0, int64_t p1, const cell_extra * exts, uint8_t * out) const {
    const size_t n_bytes = static_cast<size_t>(p1 - p0) * layout.ext_bytes();
    write_header(out, block_kind::rows, hash, p0, p1);
    if (n_bytes > 0) {
        std::memcpy(out + sizeof(block_header), exts, n_bytes);
    }
    return out + sizeof(block_header) + n_bytes;
}

void row_memory::release(held_rows::handle rows) {
    if (held.has(rows)) {
        const auto [p0, p1] = held.range_of(rows);
        n_only_held -= n_own(rows, p0, p1);
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
