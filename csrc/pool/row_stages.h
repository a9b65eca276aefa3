// How the rows of layers that lie in host memory reach the device: through a few stages, each with room for one layer.
//
// Layer i of these has stage i modulo their number. While one computes, the next ones are copied, also the first ones of
// the next evaluation, and new rows go from the stage to the host when their layer is done.
#pragma once

#include "core/layout.h"
#include "device/tensor_buffer.h"

#include <array>

// Kernels may read a little after the last quantised row.
constexpr size_t row_slack = 4096;

using kv_buffers = std::array<tensor_buffer, 2>;

// All rows of one layer, of K and of V: on the device if it is resident, else on the host.
struct stored_layer {
    bool                  resident;
    size_t                order;  // among those that are not
    std::array<size_t, 2> row;    // bytes of one
    kv_buffers            rows;
};

class row_stages {
public:
    // For the layers of `all` that are not resident, of `n_rows` rows each; both must outlive this, and so must `copies`.
    row_stages(transfer & copies, const std::vector<stored_layer> & all, int64_t n_rows, size_t n_stages,
               ggml_backend_buffer_type_t device);

    // The stage of `layer`, which is not resident.
    kv_buffers & rows_of(const stored_layer & layer) { return stage_of(layer.order).rows; }

    // Before an evaluation that starts after n rows: the layers that come first have these.
    void prepare(int64_t n);

    // In the evaluation of [first, last): attention of `layer` has been computed, nothing more is on its way. The next
    // layer's rows are there when it returns.
    void layer_done(const stored_layer & layer, int64_t first, int64_t last);

    // Rows from n on are void, also after an evaluation that failed.
    void truncate(int64_t n);

    // Waits until all rows that layers are done with are in host memory.
    void wait_home() { copies.progress().wait(home); }

    uint64_t streamed_bytes() const { return n_streamed; }  // copied into stages so far
    double   waited_ms() const { return waited; }           // by evaluations, for these copies

private:
    // The first `n` rows of layer `holds`, in the order of those that have stages, are there when `loaded` is complete.
    struct stage {
        kv_buffers            rows;
        size_t                holds  = 0;
        int64_t               n      = 0;
        copy_progress::ticket loaded = 0;
    };

    stage & stage_of(size_t i) { return stages[i % stages.size()]; }
    void    fill(stage & stage, size_t i, int64_t n);
    void    wait(stage & stage);

    transfer &                        copies;
    std::vector<const stored_layer *> streamed;  // in order
    std::vector<stage>                stages;
    copy_progress::ticket             home       = 0;
    uint64_t                          n_streamed = 0;
    double                            waited     = 0.0;
};
