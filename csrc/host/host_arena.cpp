#include "host/host_arena.h"

#include "device/device_runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <thread>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace {

constexpr size_t granule   = 64 << 10;
constexpr size_t huge_page = 2 << 20;
constexpr size_t page      = 4 << 10;
constexpr size_t nowhere   = SIZE_MAX;

size_t rounded(size_t size, size_t unit) {
    return (size + unit - 1) / unit * unit;
}

void touch(uint8_t * data, size_t size) {
    if (madvise(data, size, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    for (size_t i = 0; i < size; i += page) {
        *const_cast<volatile uint8_t *>(data + i) = 0;
    }
}

}  // namespace

host_arena & host_arena::instance() {
    static host_arena * const arena = new host_arena;
    return *arena;
}

bool host_arena::open(size_t limit, size_t ahead, size_t initial, bool registered) {
    if ((registered && !device_runtime::can_pin()) || limit < slab) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (base_ != nullptr) {
        return true;
    }
    limit = limit / slab * slab;
    // Addresses only: memory comes with `add_slab`.
    void * region = mmap(nullptr, limit + huge_page, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) {
        return false;
    }
    const auto first = rounded(reinterpret_cast<uintptr_t>(region), huge_page);
    auto *     base  = reinterpret_cast<uint8_t *>(first);
    madvise(base, limit, MADV_HUGEPAGE);
    limit_      = limit;
    ahead_      = ahead;
    initial_    = initial;
    registered_ = registered;
    ready_.assign(limit / slab, false);
    for (size_t at = 0; at < limit; at += slab) {
        occupied_.emplace(at, at + slab);
    }
    base_ = base;
    std::thread([this] { run(); }).detach();
    return true;
}

void * host_arena::allocate(size_t size) {
    size = rounded(size, granule);
    while (true) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const size_t                      at = find_hole(size);
            if (at != nowhere) {
                occupied_.emplace(at, at + size);
                allocated_ += size;
                changed_.notify_one();
                return base_ + at;
            }
            if (!can_grow()) {
                return nullptr;
            }
        }
        add_slab();
    }
}

void host_arena::free(void * data, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    occupied_.erase(static_cast<uint8_t *>(data) - base_);
    allocated_ -= rounded(size, granule);
    changed_.notify_one();
}

void host_arena::count_outside(std::ptrdiff_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outside_ += static_cast<size_t>(bytes);
    changed_.notify_one();
}

void host_arena::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    const std::lock_guard<std::mutex> last_call(device_calls_);
}

size_t host_arena::contiguous(const void * data, size_t size) const {
    const auto *    at   = static_cast<const uint8_t *>(data);
    const uint8_t * base = base_;
    if (base == nullptr || at < base || at >= base + limit_) {
        return size;
    }
    return std::min(size, slab - (at - base) % slab);
}

size_t host_arena::used() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_ + outside_;
}

size_t host_arena::held() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return taken();
}

void host_arena::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        if (spare_slab() != nowhere) {
            lock.unlock();
            return_slab();
            lock.lock();
        } else if (needs_slab()) {
            lock.unlock();
            add_slab();
            lock.lock();
        } else {
            changed_.wait(lock);
        }
    }
}

bool host_arena::needs_slab() const {
    const size_t ready = n_ready_ * slab;
    return can_grow() && (ready < initial_ || ready - allocated_ < ahead_);
}

// Makes one more slab ready, unless another thread has reached the limit meanwhile.
void host_arena::add_slab() {
    const std::lock_guard<std::mutex> one_at_a_time(device_calls_);
    std::unique_lock<std::mutex>      lock(mutex_);
    if (!can_grow()) {
        return;
    }
    const size_t    index = std::find(ready_.begin(), ready_.end(), false) - ready_.begin();
    uint8_t * const data  = base_ + index * slab;
    lock.unlock();
    touch(data, slab);
    const bool is_pinned = !registered_ || device_runtime::pin(data, slab);
    lock.lock();
    if (!is_pinned) {
        is_full_ = true;
        madvise(data, slab, MADV_DONTNEED);
        return;
    }
    ready_[index] = true;
    ++n_ready_;
    occupied_.erase(index * slab);
}

void host_arena::return_slab() {
    const std::lock_guard<std::mutex> one_at_a_time(device_calls_);
    std::unique_lock<std::mutex>      lock(mutex_);
    const size_t                      first = spare_slab();
    if (first == nowhere) {
        return;
    }
    occupied_.emplace(first, first + slab);
    lock.unlock();
    const bool is_unpinned = !registered_ || device_runtime::unpin(base_ + first);
    if (is_unpinned) {
        madvise(base_ + first, slab, MADV_DONTNEED);
    }
    lock.lock();
    if (!is_unpinned) {
        stopped_ = true;
        occupied_.erase(first);
        return;
    }
    ready_[first / slab] = false;
    --n_ready_;
}

// The last slab without buffers, if buffers outside of the arena leave no room for it.
size_t host_arena::spare_slab() const {
    if (stopped_ || taken() <= limit_) {
        return nowhere;
    }
    for (size_t first = limit_; first > 0;) {
        first -= slab;
        const auto next    = occupied_.lower_bound(first + slab);
        const bool is_free = next == occupied_.begin() || std::prev(next)->second <= first;
        if (is_free) {
            return first;
        }
    }
    return nowhere;
}

// Where the first hole of `size` bytes starts.
size_t host_arena::find_hole(size_t size) const {
    size_t at = 0;
    for (const auto & [first, last] : occupied_) {
        if (first - at >= size) {
            return at;
        }
        at = last;
    }
    return limit_ - at >= size ? at : nowhere;
}
