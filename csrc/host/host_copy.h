// Copies within host memory, by several threads where one does not reach the speed of the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct host_copy {
    uint8_t *       to;
    const uint8_t * from;
    size_t          size;
};

// They are complete when it returns. None may overlap another.
void copy_on_host(const std::vector<host_copy> & parts);
