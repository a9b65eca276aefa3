// A device library that only registers memory, in CUDA's place: loaded before pyctl's extension,
// see test_host_arena.py. It ends the process where a range is registered or released twice.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

std::mutex               mutex;
std::map<void *, size_t> registered;
size_t                   max_ranges = SIZE_MAX;

}  // namespace

extern "C" {

int cudaHostRegister(void * data, size_t size, unsigned) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (registered.size() == max_ranges) {
        return 2;  // out of memory
    }
    if (!registered.emplace(data, size).second) {
        std::abort();
    }
    return 0;
}

int cudaHostUnregister(void * data) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (registered.erase(data) == 0) {
        std::abort();
    }
    return 0;
}

int cudaGetLastError() {
    return 0;
}

// Refuses more than n ranges from now on.
void allow(size_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    max_ranges = n;
}

size_t registered_bytes() {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t                            sum = 0;
    for (const auto & [data, size] : registered) {
        sum += size;
    }
    return sum;
}
}
