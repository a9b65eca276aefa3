// Attention to a few of many rows: those at the beginning, those at the end, what is pinned, and the chunks that a layer's
// own queries look at most. Which these are depends on queries, keys and pins alone, and attention gets their rows in the
// order of positions, so the result does not depend on where they lie. Chosen rows of layers in host memory stay on the
// device in slots until others need these.
#pragma once

#include "pool/redirect.h"
#include "selection/block_means.h"

#include <algorithm>

struct selection_settings {
    int64_t rows  = 0;    // that each layer chooses or that are pinned; 0 for attention to everything
    int64_t sinks = 64;   // at the beginning, and
    int64_t tail  = 256;  // at the end, which are always attended to
    int64_t block = 4;    // keys of a mean
    int64_t batch = 8;    // the most tokens of an evaluation
};

class row_selection {
public:
    // For `layers` of `n_rows` rows each; all must outlive this. std::invalid_argument for settings that make no sense,
    // std::runtime_error where the device cannot compute it, or without memory.
    row_selection(llama_context * ctx, transfer & copies, std::vector<stored_layer> & layers, int64_t n_rows,
                  const selection_settings & settings, ggml_backend_buffer_type_t device);

    // The most tokens of an evaluation.
    int64_t n_batch() const { return own.batch; }

    // Whether there is anything to choose in the evaluation of rows from `first` on.
    bool leaves_out(int64_t first) const { return tail_of(first) - n_sinks > n_chosen; }

    // From now on rows of these ranges, and no others, are attended to. std::invalid_argument for what is no range of
    // rows, and for more chunks than are chosen.
    void    pin(const std::vector<std::pair<int64_t, int64_t>> & ranges);
    int64_t n_pinned() const { return static_cast<int64_t>(pinned.size()); }

    // Before the evaluation of rows [first, last), in which something is to be chosen: where layers write.
    const std::vector<redirect::place> & begin(int64_t first, int64_t last);

    // What they read then, and in which of its rows the first new one comes.
    redirect::gathered target();

    // Within it: queries and new rows of layer `index` have been computed, and `attention` is the node that comes next.
    void gather(size_t index, const ggml_tensor & attention);

    // It has succeeded: new rows that belong into host memory are on their way there.
    void end();

    // Rows from n on are void.
    void truncate(int64_t n);

    // The chunks that layer `index` has chosen last.
    const std::vector<int32_t> & chosen(size_t index) const { return streams.at(index).chosen; }

    uint64_t selected() const { return n_selected; }  // chunks that layers have chosen
    uint64_t fetched() const { return n_fetched; }    // of these, copied from host memory
    size_t   bytes() const;                           // on the device

private:
    // Of one layer; slots only if its rows lie in host memory. The first ones are those of the last rows, as a ring.
    struct stream {
        std::vector<int32_t> chosen;
        tensor_buffer        k, v;
        std::vector<int32_t> chunk_in;  // of each slot behind the ring; -1 if it is free
        std::vector<int32_t> slot_of;   // of each chunk; -1 if it has none
    };

    // The first chunk of the tail of an evaluation that begins with row `first`, and where in a ring the row of a position is.
    int64_t tail_of(int64_t first) const { return std::max(int64_t(0), first - own.tail) / chunk_rows; }
    int64_t ring_row(int64_t position) const { return position / chunk_rows % n_ring * chunk_rows + position % chunk_rows; }
    void    choose(size_t index, const std::vector<float> & shares);
    void    fetch(size_t index);
    void    fill_ring(int64_t from, int64_t to);
    void    copy_chunks(size_t index, size_t chunk, size_t slot, size_t count);

    ggml_tensor * in_order(ggml_context * ctx, const tensor_buffer & from, size_t row, const tensor_buffer & to,
                           int64_t n) const;

    template <typename F> void each_part(int64_t from, int64_t to, const F & copy);

    transfer &                   copies;
    std::vector<stored_layer> &  layers;
    int64_t                      n_rows;
    selection_settings           own;
    int64_t                      n_sinks, n_chosen, n_ring;  // chunks
    std::vector<int32_t>         pinned;                     // chunks, in order
    block_means                  means;
    tensor_buffer                k, v;              // the rows that attention reads, in order
    tensor_buffer                sources, targets;  // which chunks these are; where new rows go
    std::vector<stream>          streams;
    std::vector<redirect::place> places;
    std::vector<int64_t>         new_rows;
    std::vector<int32_t>         order;                     // of the layer that is gathered: numbers of chunks or slots
    int64_t                      first = 0, last = 0;       // of the evaluation
    int64_t                      ring_first = 0, ring_last = 0;  // rows that are in the rings
    uint64_t                     n_selected = 0, n_fetched = 0;
};
