// Copies between tensors of a context and host memory: asynchronous where GPUs hold everything and offer a second
// stream each, one after the other where not.
//
// Asynchronous copies wait for nothing on the host: `save` and `load` put them on a stream of their own for each device,
// `save_staged` on another, since devices copy both ways at a time. Events order these with the stream that computes there,
// and `finish` waits. The host memory has to live until then.
#pragma once

#include "device/copy_progress.h"
#include "host/host_arena.h"

// `count` pieces of `size` bytes: in the tensor from `offset` on, `stride` apart; in host memory `pitch` apart.
struct copy_region {
    ggml_tensor * tensor;
    size_t        offset;
    size_t        size;
    size_t        count  = 1;
    size_t        stride = 0;
    size_t        pitch  = 0;
};

// The buffer that a tensor or what it is a view of lies in.
ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor);

// `size` bytes of `tensor` from `offset` on, as a tensor of bytes.
ggml_tensor bytes_of(const ggml_tensor * tensor, size_t offset, size_t size);
ggml_tensor bytes_of(ggml_backend_buffer_t buffer, size_t offset, size_t size);

class transfer {
public:
    // `tensors` is what will be copied; what is like `staged` is copied at a time by `save_staged`. Host memory may lie
    // in `pinned`, which no copy may cross from one registered range into the next. With a `lag`, copies that are not
    // asynchronous pretend to be, see copy_progress.h.
    transfer(llama_context * ctx, const std::vector<ggml_tensor *> & tensors, const std::vector<copy_region> & staged,
             const host_arena & pinned, size_t lag = 0);
    ~transfer() { finish(); }

    transfer(const transfer &)             = delete;
    transfer & operator=(const transfer &) = delete;

    bool is_async() const { return !lanes.empty() || pretends; }

    // What has been computed, or will be by what is on its way, goes to `dst`; the tensors must not change before `finish`.
    void save_begin();
    void save(const copy_region & from, uint8_t * dst);

    // The same for tensors that the next computation overwrites: a copy on the device goes to the host.
    void save_staged(const std::vector<copy_region> & from, uint8_t * dst);

    // All bytes of `regions`, which are like `staged` ones, become zero; what is computed or copied after this sees it.
    void wipe(const std::vector<copy_region> & regions);

    // `src` goes to the tensors; what is computed after `load_end` sees it.
    void load_begin() { save_begin(); }
    void load(const copy_region & to, const uint8_t * src);
    void load_end();

    // `src`, which may be changed when it returns unless it is pinned, goes to the tensors on the device's own stream: what is
    // computed after this sees it, and nothing else waits.
    void put(const copy_region & to, const uint8_t * src);

    // What has been computed, or will be by what is on its way, goes from one place to another, which has as many pieces of
    // the same size, on the stream that computes: what is computed after this sees it, and what is copied after another
    // `save_begin` or `load_begin`. Nothing may be on its way from there or to there, unless that stream waits for it.
    void move_begin();
    void move(const copy_region & from, const copy_region & to);

    // Wait for all copies.
    void finish();

    // How far they have come.
    copy_progress & progress() { return done; }

private:
    // The streams of a device: the scheduler's, which computes, one that copies, and one for what leaves by its stage.
    struct lane {
        ggml_backend_dev_t device;
        ggml_backend_t     compute;
        event_handle       computed;
        event_handle       copied;
        event_handle       left;
        buffer_handle      stage_buffer;  // on the device; null where nothing is staged
        size_t             staged = 0;    // its bytes
        buffer_handle      zeros;         // on the device, as large as the largest region that is staged; or null
        size_t             n_zeros = 0;
        backend_handle     copies;        // these go first
        backend_handle     leaves;
    };

    // Host memory that a stage is copied to, until the ticket is complete.
    struct range {
        const uint8_t *       first;
        const uint8_t *       last;
        copy_progress::ticket ticket;
    };

    bool        open_lanes(const std::vector<ggml_tensor *> & tensors);
    void        open_stages(const std::vector<copy_region> & staged);
    lane &      lane_of(const ggml_tensor * tensor);
    void        open_zeros(lane & lane);
    bool        has_zeros() const;
    void        save_by(ggml_backend_t stream, const copy_region & from, uint8_t * dst);
    void        forget_left();
    void        wait_for_left(lane & lane, const uint8_t * first, const uint8_t * last);

    template <typename F> void each_contiguous(const copy_region & region, const uint8_t * host, const F & copy) const;

    llama_context *          ctx;
    const host_arena &       pinned;
    bool                     pretends;
    copy_progress            done;
    bool                     has_stages = false;
    std::deque<range>        leaving;  // in the order of their tickets
    std::vector<lane>        lanes;  // none where copies are not asynchronous; they go first
};
