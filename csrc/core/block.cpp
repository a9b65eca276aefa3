#include "core/block.h"

#include <cstring>
#include <stdexcept>

constexpr uint32_t format_version = 1;

void write_header(uint8_t * data, const char * kind, uint64_t layout, int64_t p0, int64_t p1) {
    block_header header{};
    std::memcpy(header.magic, kind, sizeof(header.magic));
    header.version = format_version;
    header.layout  = layout;
    header.p0      = p0;
    header.p1      = p1;
    std::memcpy(data, &header, sizeof(header));
}

block_header read_header(const uint8_t * data, size_t size, const char * kind, uint64_t layout) {
    block_header header{};
    if (size < sizeof(header)) {
        throw std::invalid_argument("a block of " + std::to_string(size) + " bytes is shorter than its header");
    }
    std::memcpy(&header, data, sizeof(header));
    if (std::memcmp(header.magic, kind, sizeof(header.magic)) != 0 || header.version != format_version) {
        throw std::invalid_argument(std::string("these bytes are not a block of kind ") + kind);
    }
    if (header.layout != layout) {
        throw std::invalid_argument("the block was taken from a model or cache of another layout");
    }
    if (header.p0 < 0 || header.p1 < header.p0 || header.p1 > last_position) {
        throw std::invalid_argument("the block claims positions " + range_text(header.p0, header.p1));
    }
    return header;
}

std::string range_text(int64_t p0, int64_t p1) {
    return "[" + std::to_string(p0) + ", " + std::to_string(p1) + ")";
}
