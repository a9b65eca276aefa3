// Pinned host memory for saved rows and states, made ready ahead of need.
//
// Asking a driver for pinned memory is slow and holds up running kernels. Touching fresh pages is the slow half and needs
// no driver; registering pages that are there already takes a tenth of the time. So a thread touches and registers
// slab after slab, a little ahead of what is used, and what was freed is used again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

class host_arena {
public:
    // The unit of growth. A device copies across two registered ranges only in two copies, see `contiguous`.
    static constexpr size_t slab = size_t(64) << 20;

    // One per process, because memory is registered with the device library for the whole process, and never destroyed,
    // because buffers outlive whoever opened it.
    static host_arena & instance();

    // Hold up to `limit` bytes and keep `ahead` of them ready beyond what is used. False, and no arena, where the loaded
    // device library cannot register memory. Opening again only raises the two numbers as far as the first limit allows.
    bool open(size_t limit, size_t ahead);

    // `size` bytes, or null when there is no room; may have to make slabs ready first. Any thread.
    void * allocate(size_t size);

    // Takes back what `allocate` returned. Any thread.
    void free(void * data);

    // Make `bytes` of contiguous memory ready in the background, once; returns at once.
    void reserve(size_t bytes);

    // Make nothing ready any more; returns when the thread no longer calls the device library, which the end of the
    // process takes apart.
    void stop();

    // How many of `size` bytes at `data` lie in one registered range, so that one copy may move them. All of them where
    // `data` is not the arena's. Any thread, without a lock: the arena never moves.
    size_t contiguous(const void * data, size_t size) const;

private:
    host_arena() = default;

    bool   grow();
    void   run();
    void   insert_free(size_t at, size_t size);
    size_t largest_free() const;

    mutable std::mutex       mutex_;
    std::mutex               growing_;
    std::condition_variable  changed_;
    std::atomic<uint8_t *>   base_{ nullptr };  // set once, after `limit_`
    size_t                   limit_    = 0;
    size_t                   ahead_    = 0;
    size_t                   reserved_ = 0;  // more than `ahead_`, once
    size_t                   ready_    = 0;  // bytes touched and registered
    bool                     full_  = false;  // the system refused more, or nobody wants more
    std::map<size_t, size_t> free_;       // offset -> size, never adjacent
    std::map<size_t, size_t> allocated_;  // offset -> size
};
