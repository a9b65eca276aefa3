#include "core/cells.h"

std::vector<plane> planes_of(const row_layout & rows, size_t n_cells) {
    std::vector<plane> planes;
    size_t             before = 0;
    for (const auto * tensors : { &rows.k, &rows.v }) {
        for (size_t i = 0, n; i < tensors->size(); i += n) {
            const row_tensor & first  = (*tensors)[i];
            for (const row_part & part : first.parts) {
                planes.push_back({ bytes_of(part.tensor, 0, ggml_nbytes(part.tensor)), part.size, 1, 0, before, part.place, first.row, part.is_copy });
            }
            if (!first.parts.empty()) {
                before += first.row;
                n = 1;
                continue;
            }
            const auto         at     = [&](size_t j) { return static_cast<const uint8_t *>((*tensors)[j].tensor->data); };
            const auto         stride = i + 1 < tensors->size() ? at(i + 1) - at(i) : 0;
            for (n = 1; first.n_embd == 1 && stride > 0 && i + n < tensors->size() && (*tensors)[i + n].row == first.row &&
                        buffer_of((*tensors)[i + n].tensor) == buffer_of(first.tensor) && at(i + n) - at(i + n - 1) == stride;) {
                ++n;
            }
            // Copies are checked against the size of the tensor, so this one has to reach to the end of the last.
            const size_t size = at(i + n - 1) - at(i) + ggml_nbytes((*tensors)[i + n - 1].tensor);
            plane        joined{ bytes_of(first.tensor, 0, size), first.row, n, n > 1 ? static_cast<size_t>(stride) : 0, before, 0, first.row };
            if (first.n_embd > 1) {
                joined.count  = first.n_embd;
                joined.stride = n_cells * first.row;
            }
            planes.push_back(joined);
            before += joined.count * first.row;
        }
    }
    return planes;
}

std::vector<cell_run> take(library::cache cache, const std::vector<int64_t> & cells, llama_seq_id seq,
                           const std::vector<llama_pos> & positions, int64_t p0) {
    if (cells.empty()) {
        throw out_of_cells("llama.cpp finds no cells for " + std::to_string(positions.size()) + " rows");
    }
    cache.take(cells, seq, positions);
    std::vector<cell_run> runs;
    for (size_t i = 0; i < cells.size(); ++i) {
        append_run(runs, { cells[i], p0 + static_cast<int64_t>(i), 1 });
    }
    return runs;
}
