// The operator new[] of all C++ libraries that a process loads after this one: large arrays start at a cache line.
//
// ggml-cpu keeps what it multiplies with in an array of bytes. malloc returns large arrays 16 bytes behind the start of a
// page, so that each read of 64 bytes takes two lines. `bench.rows` shows the speed of prompts.
#include <cstdlib>
#include <new>

namespace {

constexpr size_t cache_line = 64;

// Bytes from which an array is aligned: the others are many, and alignment takes memory.
constexpr size_t min_aligned = 4096;

void * allocate(size_t size) noexcept {
    if (size < min_aligned) {
        return std::malloc(size == 0 ? 1 : size);
    }
    void * memory = nullptr;
    return posix_memalign(&memory, cache_line, size) == 0 ? memory : nullptr;
}

}  // namespace

// The operator delete[] of the C++ library releases it with free().
void * operator new[](size_t size) {
    void * memory = allocate(size);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}

void * operator new[](size_t size, const std::nothrow_t &) noexcept {
    return allocate(size);
}
