// Pinned host memory for saved rows and states, made ready ahead of use.
//
// Allocating pinned memory through the driver is slow and blocks running kernels. Touching fresh
// pages is the slow half and needs no driver; registering touched pages takes a tenth of the time.
// So a thread touches and registers one slab after another, a little ahead of use and up to a
// limit, and freed memory is used again. Buffers that fit no hole lie outside of the arena; only
// for these do slabs without buffers return to the system, so that both stay within the limit.
//
// Any thread may call. `mutex_` guards all fields. The device library is called without it, one
// call at a time (`device_calls_`), for slabs that are not a hole: before they are ready, or when they
// return.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

class host_arena {
public:
    // The unit of growth. A device copies across two registered ranges only in two copies.
    static constexpr size_t slab = size_t(64) << 20;

    // One per process, because memory is registered for the whole process, and never destroyed,
    // because buffers outlive the object that opened it.
    static host_arena & instance();

    // Hold up to `limit` bytes, `count_outside`'s included: `initial` bytes from the start, and
    // always `ahead` unused ones. False, and no arena, where the loaded device library cannot
    // register memory. Opening again changes nothing. Without `registered`, for tests, nothing is
    // pinned, and no device library is needed.
    bool open(size_t limit, size_t ahead, size_t initial, bool registered = true);

    // Returns `size` bytes, or null without room; may have to make slabs ready first.
    void * allocate(size_t size);

    // Frees `size` bytes of `allocate`.
    void free(void * data, size_t size);

    // So many bytes more (or less) are in use that do not come from here.
    void count_outside(std::ptrdiff_t bytes);

    // Calls the device library no more: it is unloaded at the end of the process.
    void stop();

    // How many of `size` bytes at `data` lie in one registered range, so that one copy may move
    // them. All of them where `data` is not the arena's. Takes no lock: the arena never moves.
    size_t contiguous(const void * data, size_t size) const;

    // Bytes of buffers in use, whether they come from here or not.
    size_t used() const;

    // Bytes that buffers take of the system: those outside, and all slabs that are ready.
    size_t held() const;

private:
    void   run();
    void   add_slab();
    void   return_slab();
    bool   can_grow() const { return !stopped_ && !is_full_ && taken() + slab <= limit_; }
    bool   needs_slab() const;
    size_t spare_slab() const;
    size_t find_hole(size_t size) const;
    size_t taken() const { return n_ready_ * slab + outside_; }

    mutable std::mutex       mutex_;
    std::mutex               device_calls_;
    std::condition_variable  changed_;
    std::atomic<uint8_t *>   base_{ nullptr };  // set once, after `limit_`
    size_t                   limit_      = 0;
    size_t                   ahead_      = 0;
    size_t                   initial_    = 0;
    bool                     registered_ = true;
    std::vector<bool>        ready_;  // whether each slab is touched and registered
    size_t                   n_ready_   = 0;
    size_t                   allocated_ = 0;
    size_t                   outside_   = 0;
    bool                     is_full_   = false;  // the system registers no more
    bool                     stopped_   = false;  // by a caller, or the system takes nothing back
    std::map<size_t, size_t> occupied_;  // [first, last) of buffers and of slabs that are not ready
};
