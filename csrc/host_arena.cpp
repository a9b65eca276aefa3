#include "host_arena.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <thread>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace {

constexpr size_t granule   = 64 << 10;
constexpr size_t huge_page = 2 << 20;
constexpr size_t page      = 4 << 10;

constexpr unsigned portable = 1;  // cudaHostRegisterPortable, hipHostRegisterPortable

using register_function = int (*)(void *, size_t, unsigned);
using error_function    = int (*)();

// The runtime that the loaded device library uses, found by name: the extension is linked to no device library.
struct device_runtime {
    register_function register_memory = nullptr;
    error_function    clear_error     = nullptr;

    device_runtime() {
        for (const char * vendor : { "cuda", "hip" }) {
            const std::string name(vendor);
            register_memory = reinterpret_cast<register_function>(dlsym(RTLD_DEFAULT, (name + "HostRegister").c_str()));
            clear_error     = reinterpret_cast<error_function>(dlsym(RTLD_DEFAULT, (name + "GetLastError").c_str()));
            if (register_memory != nullptr) {
                return;
            }
        }
    }

    bool pin(void * data, size_t size) const {
        if (register_memory(data, size, portable) == 0) {
            return true;
        }
        if (clear_error != nullptr) {
            clear_error();
        }
        return false;
    }
};

const device_runtime & runtime() {
    static const device_runtime found;
    return found;
}

size_t rounded(size_t size, size_t unit) {
    return (size + unit - 1) / unit * unit;
}

}  // namespace

host_arena & host_arena::instance() {
    static host_arena * const arena = new host_arena;
    return *arena;
}

bool host_arena::open(size_t limit, size_t ahead) {
    if (runtime().register_memory == nullptr || limit < slab) {
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
        limit_ = limit;
        base_  = base;
        std::thread([this] { run(); }).detach();
    }
    ahead_ = std::min(std::max(ahead, ahead_), limit_);
    changed_.notify_one();
    return true;
}

void * host_arena::allocate(size_t size) {
    size = rounded(size, granule);
    while (true) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (base_ == nullptr || size == 0) {
                return nullptr;
            }
            for (auto it = free_.begin(); it != free_.end(); ++it) {
                if (it->second < size) {
                    continue;
                }
                const size_t at = it->first, rest = it->second - size;
                free_.erase(it);
                if (rest > 0) {
                    free_.emplace(at + size, rest);
                }
                allocated_.emplace(at, size);
                changed_.notify_one();
                return base_ + at;
            }
        }
        if (!grow()) {
            return nullptr;
        }
    }
}

void host_arena::free(void * data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        it = allocated_.find(static_cast<uint8_t *>(data) - base_);
    insert_free(it->first, it->second);
    allocated_.erase(it);
}

void host_arena::reserve(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserved_ = bytes;
    changed_.notify_one();
}

void host_arena::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        full_ = true;
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

// Makes one more slab ready; false when there is none to be had.
bool host_arena::grow() {
    const std::lock_guard<std::mutex> one_at_a_time(growing_);
    size_t                            at;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (full_ || ready_ + slab > limit_) {
            return false;
        }
        at = ready_;
    }
    if (madvise(base_ + at, slab, MADV_POPULATE_WRITE) != 0) {
        for (size_t i = 0; i < slab; i += page) {
            *const_cast<volatile uint8_t *>(base_ + at + i) = 0;
        }
    }
    const bool pinned = runtime().pin(base_ + at, slab);

    const std::lock_guard<std::mutex> lock(mutex_);
    full_ = full_ || !pinned;
    if (!pinned) {
        madvise(base_ + at, slab, MADV_DONTNEED);
        return false;
    }
    ready_ += slab;
    insert_free(at, slab);
    return true;
}

void host_arena::run() {
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] {
                const size_t free = largest_free();
                reserved_           = free < reserved_ ? reserved_ : 0;
                return !full_ && ready_ + slab <= limit_ && free < std::max(ahead_, reserved_);
            });
        }
        grow();
    }
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

size_t host_arena::largest_free() const {
    size_t largest = 0;
    for (const auto & [at, size] : free_) {
        largest = std::max(largest, size);
    }
    return largest;
}
