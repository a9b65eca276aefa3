#include "host/host_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace {

constexpr size_t bytes_for_threads = size_t(16) << 20;
constexpr size_t bytes_per_piece   = size_t(4) << 20;
constexpr size_t most_threads      = 4;

}  // namespace

void copy_on_host(const std::vector<host_copy> & parts) {
    std::vector<host_copy> pieces;
    size_t                 sum = 0;
    for (const host_copy & part : parts) {
        sum += part.size;
        for (size_t at = 0; at < part.size; at += bytes_per_piece) {
            pieces.push_back({ part.to + at, part.from + at, std::min(bytes_per_piece, part.size - at) });
        }
    }
    std::atomic<size_t> next{ 0 };
    const auto          work = [&] {
        for (size_t i = next++; i < pieces.size(); i = next++) {
            std::memcpy(pieces[i].to, pieces[i].from, pieces[i].size);
        }
    };
    const size_t n_threads = sum < bytes_for_threads ? 1 : std::min<size_t>(most_threads, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (size_t i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
}
