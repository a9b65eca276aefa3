#include "core/cells.h"

std::vector<plane> planes_of(const row_layout & rows, size_t n_cells) {
    std::vector<plane> planes;
    size_t             before = 0;
    for (const auto * tensors : { &rows.k, &rows.v }) {
        for (size_t i = 0, n; i < tensors->size(); i += n) {
            const row_tensor & first    = (*tensors)[i];
            const auto         part     = [&](size_t j) { return (*tensors)[j].parts[0].tensor; };
            const auto         at       = [&](size_t j) { return static_cast<const uint8_t *>(part(j)->data); };
            const auto         is_whole = [&](size_t j) { return j < tensors->size() && (*tensors)[j].parts.size() == 1; };
            const auto         stride   = is_whole(i + 1) ? at(i + 1) - at(i) : 0;
            for (n = 1; is_whole(i) && first.n_embd == 1 && stride > 0 && is_whole(i + n) && (*tensors)[i + n].row == first.row &&
                        buffer_of(part(i + n)) == buffer_of(part(i)) && at(i + n) - at(i + n - 1) == stride;) {
                ++n;
            }
            for (const row_part & own : first.parts) {
                // Copies are checked against the size of the tensor, so this one has to reach to the end of the last.
                const size_t size = at(i + n - 1) - at(i) + ggml_nbytes(n > 1 ? part(i + n - 1) : own.tensor);
                planes.push_back({ bytes_of(own.tensor, 0, size), own.size, n, n > 1 ? static_cast<size_t>(stride) : 0, before, own.place, first.row });
            }
            if (first.n_embd > 1) {
                planes.back().row    = first.row;
                planes.back().count  = first.n_embd;
                planes.back().stride = n_cells * first.row;
            }
            before += n * first.per_token();
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
