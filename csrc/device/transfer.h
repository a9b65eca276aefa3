// Copies between tensors of a context and host memory: asynchronous where GPUs hold everything and offer a second
// stream each, one after the other where not.
//
// Each device then has three streams: the scheduler's, which computes, `copies` for `save` and `load`, and `leaves` for
// `save_staged`, since devices copy both ways at a time. Work on one stream runs in the order of the calls. Between two
// streams only events order, and the host waits for none:
//
//   computing -> copies   `save_begin`, `load_begin`: a save reads earlier results, and a load does not
//                         overwrite rows that an evaluation before it still reads.
//   copies -> computing   `load_end`: an evaluation has the bytes loaded before it. It also may overwrite bytes saved
//                         before it, so `row_memory::fence` calls it when saved rows are given up; rows that stay where
//                         they are need no such wait.
//   computing -> leaves   `save_staged` copies to a stage on the stream that computes. The next evaluation may overwrite the
//   leaves -> computing   tensors while the stage leaves, and the next content of the stage waits until it has left. A
//                         larger state goes through it in several rounds, and the next evaluation waits for all but the
//                         last.
//   leaves -> copies      `load` from host memory that a stage still goes to waits for that.
//
// `wipe`, `put` and `move` are on the stream that computes, after the evaluations before them and before those after them.
// So held rows move after a fence: saves read them where they were, evaluations and later saves where they are. To the
// host all copies are complete after `finish` or when `progress` is: its memory has to live, unchanged, until then.
// Copies that are not asynchronous are complete on return, and run in the order of the calls.
#pragma once

#include "device/copy_progress.h"
#include "device/tensor_buffer.h"
#include "host/host_arena.h"

#include "llama.h"

// The maximum bytes of a device's stage: a whole state of a 27B model would take 150 MiB of the card. An evaluation waits
// for the rest of it as long as the bus takes, 5 ms on PCIe 4.
constexpr size_t max_stage = size_t(16) << 20;

// `count` pieces of `size` bytes: in the tensor from `offset` on, `stride` apart; in host memory from `place` on, `pitch`
// apart.
struct copy_region {
    ggml_tensor * tensor;
    size_t        offset;
    size_t        size;
    size_t        count  = 1;
    size_t        stride = 0;
    size_t        pitch  = 0;
    size_t        place  = 0;

    size_t total() const { return size * count; }
    size_t end() const { return place + (count - 1) * pitch + size; }  // in host memory
};

// `count` pieces of one token's `row` bytes each, a `stride` apart on the device: tensors of the same kind that lie at
// equal distances, such as K of all layers, are one of these, and rows of all move in one copy. In a block of n rows they
// follow n times `before` bytes, a `whole` row, of which this may be a part, after the other.
struct plane {
    ggml_tensor tensor;  // from the first piece to the end of the last
    size_t      row;
    size_t      count;
    size_t      stride;
    size_t      before = 0, place = 0;
    size_t      whole  = 0;

    // The rows of n cells from `cell` on.
    copy_region cells(int64_t cell, size_t n) { return { &tensor, static_cast<size_t>(cell) * row, n * row, count, stride }; }

    // The same with their place in a block of `n_rows`, of which they are those from `first` on.
    copy_region rows(int64_t cell, size_t n, size_t first, size_t n_rows) {
        copy_region region = cells(cell, n);
        region.place       = n_rows * before + first * whole + place;
        region.pitch       = n_rows * row;
        if (row != whole) {
            region.size  = region.stride = row;
            region.count = n;
            region.pitch = whole;
        }
        return region;
    }
};

class transfer {
public:
    // `tensors` are to be copied; tensors like `staged` are copied at a time by `save_staged`, through stages of
    // `max_stage` bytes, or of the largest of them. Host memory may lie
    // in `pinned`, which no copy may cross from one registered range into the next. With a `lag`, copies that are not
    // asynchronous pretend to be, see copy_progress.h.
    transfer(llama_context * ctx, const std::vector<ggml_tensor *> & tensors, const std::vector<copy_region> & staged,
             const host_arena & pinned, size_t lag = 0);
    ~transfer() { finish(); }

    transfer(const transfer &)             = delete;
    transfer & operator=(const transfer &) = delete;

    bool is_async() const { return !lanes.empty() || pretends; }

    // Copies rows to `dst` that have been computed, or will be by work on its way.
    void save_begin();
    void save(const copy_region & from, uint8_t * dst);

    // The same for tensors that the next computation overwrites: a copy on the device goes to the host.
    void save_staged(const std::vector<copy_region> & from, uint8_t * dst);

    // All bytes of `regions`, which are like `staged` ones, become zero.
    void wipe(const std::vector<copy_region> & regions);

    // `src` goes to the tensors.
    void load_begin() { save_begin(); }
    void load(const copy_region & to, const uint8_t * src);
    void load_end();

    // `src`, which may be changed when it returns unless it is pinned, goes to the tensors.
    void put(const copy_region & to, const uint8_t * src);

    // Copies rows that have been computed, or will be by work on its way, to another place, which has as many pieces of
    // the same size.
    void move_begin();
    void move(const copy_region & from, const copy_region & to);

    // Wait for all copies.
    void finish();

    // How far they have come.
    copy_progress & progress() { return done; }

private:
    // The streams of a device.
    struct lane {
        ggml_backend_dev_t device;
        ggml_backend_t     compute;
        event_handle       computed;
        event_handle       copied;
        event_handle       left;
        tensor_buffer      stage;   // on the device; none if nothing is staged
        size_t             room;    // bytes of it; after them come zeros, as many as the largest region has
        size_t             filled;  // of the room
        backend_handle     copies;  // these go first
        backend_handle     leaves;
    };

    // Host memory that a stage is copied to, until the ticket is complete.
    struct range {
        const uint8_t *       first;
        const uint8_t *       last;
        copy_progress::ticket ticket;
    };

    // Bytes of the stage of `place`, on their way to host memory.
    struct staged_part {
        lane *      place;
        copy_region bytes;
    };

    bool        open_lanes(const std::vector<ggml_tensor *> & tensors);
    void        open_stages(const std::vector<copy_region> & staged);
    lane &      lane_of(const ggml_tensor * tensor);
    void        save_by(ggml_backend_t stream, const copy_region & from, uint8_t * dst);
    void        wait_for_stages();
    void        empty_stages(std::vector<staged_part> & parts, uint8_t * dst);
    void        forget_left();

    template <typename F> void each_contiguous(const copy_region & region, const uint8_t * host, const F & copy) const;

    llama_context *          ctx;
    const host_arena &       pinned;
    bool                     pretends;
    copy_progress            done;
    bool                     has_stages = false;
    std::deque<range>        leaving;  // in the order of their tickets
    std::vector<lane>        lanes;  // none where copies are not asynchronous; they go first
};
