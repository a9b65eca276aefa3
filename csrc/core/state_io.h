// The streams in which the library's memory modules write and read themselves: plain bytes and tensor data, in an order
// that only the library decides. Knows nothing of rows, positions or policy.
#pragma once

#include "device/transfer.h"

#include <cstring>
#include <functional>
#include <utility>

// One step of such a stream: plain bytes (tensor == nullptr), or `size` bytes of a tensor from `offset` on.
struct io_step {
    ggml_tensor *        tensor = nullptr;
    size_t               offset = 0;
    size_t               size   = 0;
    std::vector<uint8_t> bytes;
};

// The plain bytes of `step` as a value; std::runtime_error if they are no T.
template <typename T> T value_of(const io_step & step) {
    if (step.tensor != nullptr || step.bytes.size() != sizeof(T)) {
        throw std::runtime_error("llama.cpp wrote its state in an order this extension does not know");
    }
    T value;
    std::memcpy(&value, step.bytes.data(), sizeof(T));
    return value;
}

// Where the tensor data among `steps` lies.
std::vector<copy_region> regions_of(const std::vector<io_step> & steps);

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

// Feeds a memory module with plain bytes, and has each region of its tensors filled by `fill`.
class stream_reader : public llama_io_read_i {
public:
    using filler = std::function<void(const copy_region &)>;

    stream_reader(std::vector<uint8_t> plain, filler fill) : plain(std::move(plain)), fill(std::move(fill)) {}

    void   read(void * dst, size_t size) override;
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { fill({ tensor, offset, size }); }
    size_t n_bytes() override { return at; }

private:
    std::vector<uint8_t> plain;
    size_t               at = 0;
    filler               fill;
};
