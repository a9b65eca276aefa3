#include "core/state_io.h"

std::vector<copy_region> regions_of(const std::vector<io_step> & steps) {
    std::vector<copy_region> regions;
    for (const io_step & step : steps) {
        if (step.tensor != nullptr) {
            regions.push_back({ step.tensor, step.offset, step.size });
        }
    }
    return regions;
}

void recorder::write(const void * src, size_t size) {
    const auto * p = static_cast<const uint8_t *>(src);
    steps.push_back({ nullptr, 0, size, std::vector<uint8_t>(p, p + size) });
    total += size;
}

void recorder::write_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    steps.push_back({ tensor, offset, size, {} });
    total += size;
}

void stream_reader::read(void * dst, size_t size) {
    if (at + size > plain.size()) {
        throw std::runtime_error("llama.cpp asked for more state than was prepared");
    }
    std::memcpy(dst, plain.data() + at, size);
    at += size;
}
