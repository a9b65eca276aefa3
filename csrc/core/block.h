// The bytes of a saved block. They go into files, so they never change under one version; numbers are little-endian.
//
// Every block starts with 64 bytes:
//    0  char[4]  "ROWS" or "STAT"
//    4  uint32   version of this format, 1
//    8  uint64   hash of the layout's text (layout.h): bytes of another layout are refused
//   16  int64    p0, the first row (token) of the sequence; 0 for a state
//   24  int64    p1, the row after the last one; for a state, how many tokens it stands after
//   32  32 bytes, zero
//
// ROWS continues, with n = p1 - p0, with
//   n cell_extra of 12 bytes, where the model gives tokens further positions: x, y, token. Text has x = y = its
//     position; rows of an image have the token -1, their column and line counted from its position, and follow line by line,
//   the n K rows of each layer, layer by layer, of one cache after the other if there are several,
//   the n V rows of each layer, layer by layer; where V is transposed (no flash attention), a layer has one run of n
//   elements per embedding dimension instead.
// STAT continues with
//   the recurrent tensors of one cell in the order in which the library writes them (hybrid),
//   the last rows of layers with a window, as ROWS has them without further positions (hybrid), or
//   the bytes of llama_state_seq_get_data (opaque).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

// llama.cpp numbers positions with 32 bits: a block that claims more is invalid, and its size need not fit into 64.
constexpr int64_t last_position = INT32_MAX;

// The first bytes of a block of each kind.
constexpr const char * rows_block = "ROWS", * state_block = "STAT";

struct block_header {
    char     magic[4];
    uint32_t version;
    uint64_t layout;
    int64_t  p0;
    int64_t  p1;
    uint8_t  reserved[32];
};
static_assert(sizeof(block_header) == 64, "the bytes after the header stay aligned");
static_assert(offsetof(block_header, layout) == 8 && offsetof(block_header, p0) == 16 && offsetof(block_header, p1) == 24,
              "the header is part of the file format");

// `data` has room for a header.
void write_header(uint8_t * data, const char * kind, uint64_t layout, int64_t p0, int64_t p1);

// std::invalid_argument if the `size` bytes at `data` do not start with a header of this kind and layout.
block_header read_header(const uint8_t * data, size_t size, const char * kind, uint64_t layout);

// "[p0, p1)"
std::string range_text(int64_t p0, int64_t p1);
