#include "device/relocation.h"

#include <utility>

void relocation::run(const std::vector<cell_move> & moves, int64_t n_cells) {
    const copy_plan plan = plan_copies(moves, n_cells);
    if (plan.needs_scratch) {
        open_scratch();
    }
    copies.move_begin();
    for (const copy_step & step : plan.steps) {
        copy(step);
    }
    held.moved(moves);
}

void relocation::copy(const copy_step & step) {
    const bool           is_read    = step.kind == copy_kind::scratch_to_cells;
    const bool           is_written = step.kind == copy_kind::cells_to_scratch;
    std::vector<plane> & sources    = is_read ? scratch : planes;
    std::vector<plane> & targets    = is_written ? scratch : planes;
    for (const copy_run & run : step.runs) {
        const auto n = static_cast<size_t>(run.count);
        for (size_t i = 0; i < planes.size(); ++i) {
            copies.move(sources[i].cells(run.from, n), targets[i].cells(run.to, n));
        }
    }
}

void relocation::open_scratch() {
    if (!scratch.empty()) {
        return;
    }
    constexpr size_t           n_rows = n_scratch_rows + 1;  // and the one that is set aside
    std::vector<tensor_buffer> buffers;
    std::vector<plane>         opened;
    for (const plane & plane : planes) {
        const size_t stride = plane.row * n_rows;
        buffers.push_back(allocate_zeros(ggml_backend_buffer_get_type(plane.tensor.buffer),
                                         plane.count * stride));
        opened.push_back({ buffers.back().bytes, plane.row, plane.count, stride });
    }
    scratch_buffers = std::move(buffers);
    scratch         = std::move(opened);
}
