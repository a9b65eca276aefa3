// Pinned host memory for saved rows and states, made ready ahead of need.
//
// Asking a driver for pinned memory is slow and holds up running kernels. Touching fresh pages is the slow half and needs
// no driver; registering pages that are there already takes a tenth of the time. So a thread touches and registers
// slab after slab, a little ahead of what is used, and what is given back is used again.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

class host_arena {
public:
    // The unit of growth. A device copies across two registered ranges only in two copies, see `contiguous`.
    static constexpr size_t slab = size_t(64) << 20;

    // One per process, never destroyed: buffers outlive whoever opened it.
    static host_arena & instance();

    // Hold up to `limit` bytes and keep `ahead` of them ready beyond what is used. False, and no arena, where the loaded
    // device library cannot register memory. Opening again only raises the two numbers as far as the first limit allows.
    bool open(size_t limit, size_t ahead);

    // `size` bytes, or null when there is no room; may have to make slabs ready first. Any thread.
    void * allocate(size_t size);
    void   free(void * data);

    // Make `bytes` in one piece ready soon, once, before somebody needs them; returns at once.
    void reserve(size_t bytes);

    // Make nothing ready any more; returns when the thread no longer calls the device library, which the end of the
    // process takes apart.
    void stop();

    // How many of `size` bytes at `data` one copy may move.
    size_t contiguous(const void * data, size_t size) const;

    size_t n_ready() const;  // bytes touched and registered
    size_t n_used() const;   // bytes handed out

private:
    host_arena() = default;

    bool   grow();
    void   run();
    void   insert_free(size_t at, size_t size);
    size_t largest_free() const;

    mutable std::mutex       mutex_;
    std::mutex               growing_;
    std::condition_variable  changed_;
    uint8_t *                base_  = nullptr;
    size_t                   limit_ = 0;
    size_t                   ahead_ = 0;
    size_t                   reserved_ = 0;  // more than `ahead_`, once
    size_t                   ready_ = 0;
    size_t                   used_  = 0;
    bool                     full_  = false;  // the system refused more, or nobody wants more
    std::map<size_t, size_t> free_;   // offset -> size, never adjacent
    std::map<size_t, size_t> allocated_;  // offset -> size
};
