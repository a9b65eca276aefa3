// Moves bytes between the caller's buffers and llama.cpp's memory. Knows the order in which the library's memory
// modules write and read themselves, and nothing of rows, positions or policy.
#pragma once

#include "transfer.h"

#include "llama-io.h"

#include "ggml-backend.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

// One step of such a stream: plain bytes (tensor == nullptr), or `size` bytes of a tensor from `offset` on.
struct io_step {
    ggml_tensor *        tensor = nullptr;
    size_t               offset = 0;
    size_t               size   = 0;
    std::vector<uint8_t> bytes;
};

// Records what a memory module writes without moving any tensor data.
class recorder : public llama_io_write_i {
public:
    std::vector<io_step> steps;

    void   write(const void * src, size_t size) override;
    void   write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    size_t n_bytes() override { return total; }

private:
    size_t total = 0;
};

// Feeds a memory module with plain bytes written by us; `copies` brings tensor data from `src`, or, if it is null, none.
class stream_reader : public llama_io_read_i {
public:
    stream_reader(std::vector<uint8_t> plain, transfer * copies, const uint8_t * src, size_t size)
        : plain(std::move(plain)), copies(copies), src(src), left(size) {}

    void   read(void * dst, size_t size) override;
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    size_t n_bytes() override { return at; }

private:
    std::vector<uint8_t> plain;
    size_t               at = 0;
    transfer *           copies;
    const uint8_t *      src;
    size_t               left;
};

template <typename T> void append(std::vector<uint8_t> & out, const T & value) {
    const auto * p = reinterpret_cast<const uint8_t *>(&value);
    out.insert(out.end(), p, p + sizeof(T));
}

template <typename T> T value_of(const io_step & step) {
    if (step.tensor != nullptr || step.bytes.size() != sizeof(T)) {
        throw std::runtime_error("llama.cpp wrote its state in an order this extension does not know");
    }
    T value;
    std::memcpy(&value, step.bytes.data(), sizeof(T));
    return value;
}
