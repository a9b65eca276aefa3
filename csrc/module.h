// What each extension module starts with.
#pragma once

#include <stdexcept>

// std::runtime_error, with which its import fails, unless the loaded library and the loaded `_core` are `build`'s.
void check_module(const char * build);
