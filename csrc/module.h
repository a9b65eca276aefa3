// The check at the import of each extension module.
#pragma once

#include <stdexcept>

// std::runtime_error, with which its import fails, unless the loaded library and the loaded `_core` are `build`'s.
void check_module(const char * build);
