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

// Unpinning holds up the device a little: so long it has between one slab that is spare and the next.
constexpr std::chrono::milliseconds between_slabs{ 100 };

size_t rounded(size_t size, size_t unit) {
    return (size + unit - 1) / unit * unit;
}

}  // namespace

host_arena & host_arena::instance() {
    static host_arena * const arena = new host_arena;
    return *arena;
}

bool host_arena::open(size_t limit, size_t ahead, size_t keep, double quiet, bool registered) {
    if ((registered && !device_runtime::can_pin()) || limit < slab) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (base_ == nullptr) {
        limit = limit / slab * slab;
        // Addresses only: memory comes with `grow`.
        void * region = mmap(nullptr, limit + huge_page, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED) {
            return false;
        }
        auto * const base = reinterpret_cast<uint8_t *>(rounded(reinterpret_cast<uintptr_t>(region), huge_page));
        madvise(base, limit, MADV_HUGEPAGE);
        limit_      = limit;
        keep_       = std::min(keep, limit);
        quiet_      = std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(quiet));
        registered_ = registered;
        ready_.assign(limit / slab, false);
        base_ = base;
        std::thread([this] { run(); }).detach();
    }
    ahead_ = std::min(std::max(ahead, ahead_), limit_);
    changed_.notify_one();
    return true;
}

void * host_arena::allocate(size_t size) {
    size = rounded(size, granule);
    for (bool grown = true;; grown = grow()) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (base_ == nullptr || size == 0) {
                return nullptr;
            }
            quiet_from_ = clock::now() + quiet_;
            const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto & range) { return range.second >= size; });
            if (found != free_.end()) {
                const size_t at = found->first;
                take_free(at, size);
                n_allocated_ += size;
                changed_.notify_one();
                return base_ + at;
            }
        }
        if (!grown) {  // and no other thread has grown it meanwhile
            return nullptr;
        }
    }
}

void host_arena::free(void * data, size_t size) {
    size = rounded(size, granule);
    const std::lock_guard<std::mutex> lock(mutex_);
    insert_free(static_cast<uint8_t *>(data) - base_, size);
    n_allocated_ -= size;
    changed_.notify_one();
}

void host_arena::count_outside(std::ptrdiff_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outside_ += static_cast<size_t>(bytes);
    changed_.notify_one();
}

void host_arena::reserve(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserved_ = bytes;
    changed_.notify_one();
}

void host_arena::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        full_ = keeps_ = true;
    }
    const std::lock_guard<std::mutex> last_slab(growing_);
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
    return n_allocated_ + outside_;
}

size_t host_arena::held() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return taken();
}

// Makes one more slab ready; false when there is none to be had.
bool host_arena::grow() {
    const std::lock_guard<std::mutex> one_at_a_time(growing_);
    size_t                            index;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!may_grow()) {
            return false;
        }
        index = std::find(ready_.begin(), ready_.end(), false) - ready_.begin();
    }
    uint8_t * const data = base_ + index * slab;
    if (madvise(data, slab, MADV_POPULATE_WRITE) != 0) {
        for (size_t i = 0; i < slab; i += page) {
            *const_cast<volatile uint8_t *>(data + i) = 0;
        }
    }
    const bool pinned = !registered_ || device_runtime::pin(data, slab);

    const std::lock_guard<std::mutex> lock(mutex_);
    if (!pinned) {
        full_ = true;
        madvise(data, slab, MADV_DONTNEED);
        return false;
    }
    ready_[index] = true;
    ++n_ready_;
    quiet_from_ = clock::now() + quiet_;
    insert_free(index * slab, slab);
    return true;
}

// Gives the last unused slab back to the system, if there is one.
void host_arena::shrink() {
    const std::lock_guard<std::mutex> one_at_a_time(growing_);
    size_t                            at;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        quiet_from_ = std::max(quiet_from_, clock::now() + between_slabs);
        at          = last_whole_slab();
        if (at == nowhere) {
            return;
        }
        take_free(at, slab);
    }
    const bool given = !registered_ || device_runtime::unpin(base_ + at);
    if (given) {
        madvise(base_ + at, slab, MADV_DONTNEED);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!given) {
        keeps_ = true;
        insert_free(at, slab);
        return;
    }
    ready_[at / slab] = false;
    --n_ready_;
}

void host_arena::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        reserved_ = may_grow() && largest_free() < reserved_ ? reserved_ : 0;
        if (may_shrink() || (has_spare() && clock::now() >= quiet_from_)) {
            lock.unlock();
            shrink();
            lock.lock();
        } else if (wants_more()) {
            lock.unlock();
            grow();
            lock.lock();
        } else if (has_spare()) {
            changed_.wait_until(lock, quiet_from_);
        } else {
            changed_.wait(lock);
        }
    }
}

// Whether more is to be ready. Beyond `keep_` not for lack of a hole: there may be many that are too small.
bool host_arena::wants_more() const {
    const size_t free = largest_free();
    if (!may_grow() || free >= std::max(ahead_, reserved_)) {
        return false;
    }
    return free < reserved_ || taken() + slab <= keep_ || n_ready_ * slab - n_allocated_ < ahead_;
}

bool host_arena::may_shrink() const {
    return !keeps_ && taken() > limit_ && last_whole_slab() != nowhere;
}

// Whether there is more than is to be kept, and enough is ready without it.
bool host_arena::has_spare() const {
    return !keeps_ && reserved_ == 0 && taken() > keep_ && n_ready_ * slab - n_allocated_ >= ahead_ + slab &&
           last_whole_slab() != nowhere;
}

// Where the last slab starts of which nothing is in use.
size_t host_arena::last_whole_slab() const {
    for (auto it = free_.rbegin(); it != free_.rend(); ++it) {
        const size_t end = (it->first + it->second) / slab * slab;
        if (end >= it->first + slab) {
            return end - slab;
        }
    }
    return nowhere;
}

void host_arena::insert_free(size_t at, size_t size) {
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + size) {
        size += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == at) {
            before->second += size;
            return;
        }
    }
    free_.emplace(at, size);
}

// Takes [at, at + size) out of the free range that it lies in.
void host_arena::take_free(size_t at, size_t size) {
    const auto   it    = std::prev(free_.upper_bound(at));
    const size_t start = it->first, end = it->first + it->second;
    free_.erase(it);
    if (start < at) {
        free_.emplace(start, at - start);
    }
    if (at + size < end) {
        free_.emplace(at + size, end - at - size);
    }
}

size_t host_arena::largest_free() const {
    size_t largest = 0;
    for (const auto & [at, size] : free_) {
        largest = std::max(largest, size);
    }
    return largest;
}
