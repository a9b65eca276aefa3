// Pinned host memory for saved rows and states, made ready ahead of need.
//
// Allocating pinned memory by the driver is slow and blocks running kernels. Touching fresh pages is the slow half and
// needs no driver; registering touched pages takes a tenth of the time. So a thread touches and registers slab after
// slab, a little ahead of use, and freed memory is used again. Slabs return to the system in two cases: when buffers
// that fit no hole, outside of the arena, would exceed the limit; and, beyond a lower bound, after a while without
// allocations.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

class host_arena {
public:
    // The unit of growth. A device copies across two registered ranges only in two copies, see `contiguous`.
    static constexpr size_t slab = size_t(64) << 20;

    // One per process, because memory is registered with the device library for the whole process, and never destroyed,
    // because buffers outlive the object that opened it.
    static host_arena & instance();

    // Hold up to `limit` bytes, `count_outside`'s included, and keep `ahead` unused bytes ready. Unused memory
    // beyond `keep` bytes returns to the system after `quiet` seconds without an allocation. False, and no arena, where
    // the loaded device library cannot register memory. Opening again only raises `ahead`. Without `registered`, for
    // tests, no device library is needed.
    bool open(size_t limit, size_t ahead, size_t keep, double quiet, bool registered = true);

    // `size` bytes, or null when there is no room; may have to make slabs ready first. Any thread.
    void * allocate(size_t size);

    // Frees `size` bytes of `allocate`. Any thread.
    void free(void * data, size_t size);

    // So many bytes more (or less) are in use that do not come from here. Any thread.
    void count_outside(std::ptrdiff_t bytes);

    // Make `bytes` of contiguous memory ready in the background, once, as far as there may be; returns at once.
    void reserve(size_t bytes);

    // Stop allocating ahead; returns when the thread no longer calls the device library, which is unloaded at the end of
    // the process.
    void stop();

    // How many of `size` bytes at `data` lie in one registered range, so that one copy may move them. All of them where
    // `data` is not the arena's. Any thread, without a lock: the arena never moves.
    size_t contiguous(const void * data, size_t size) const;

    // Bytes of buffers in use, whether they come from here or not.
    size_t used() const;

    // Bytes that buffers take of the system: those outside, and all slabs that are ready, used or not.
    size_t held() const;

private:
    using clock = std::chrono::steady_clock;

    host_arena() = default;

    bool   grow();
    void   shrink();
    void   run();
    void   insert_free(size_t at, size_t size);
    void   take_free(size_t at, size_t size);
    size_t largest_free() const;
    size_t taken() const { return n_ready_ * slab + outside_; }
    size_t last_whole_slab() const;
    bool   may_grow() const { return !full_ && taken() + slab <= limit_; }
    bool   wants_more() const;
    bool   may_shrink() const;
    bool   has_spare() const;

    mutable std::mutex       mutex_;
    std::mutex               growing_;
    std::condition_variable  changed_;
    std::atomic<uint8_t *>   base_{ nullptr };  // set once, after `limit_`
    size_t                   limit_      = 0;
    size_t                   ahead_      = 0;
    size_t                   keep_       = 0;
    clock::duration          quiet_{};
    clock::time_point        quiet_from_{};  // spare memory may go back from then on
    size_t                   reserved_   = 0;  // more than `ahead_`, once
    size_t                   n_ready_    = 0;  // slabs touched and registered
    size_t                   outside_    = 0;
    bool                     registered_ = true;
    bool                     full_       = false;  // the system refused more, or no more is wanted
    bool                     keeps_      = false;  // the system takes nothing back
    std::vector<bool>        ready_;      // by slab
    std::map<size_t, size_t> free_;       // offset -> size of ready ranges, never adjacent
    size_t                   n_allocated_ = 0;
};
