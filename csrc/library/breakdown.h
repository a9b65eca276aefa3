// Memory of a context and devices of layers, also of a model that is loaded without weights.
#pragma once

#include "llama.h"

#include <array>
#include <map>
#include <string>
#include <vector>

namespace library {

// Bytes of weights, K and V, states, and compute buffers by place: the name of a device, "" for the host.
std::map<std::string, std::array<size_t, 4>> breakdown(llama_context * ctx);

// Places of the layers with K and V, in order; none unless one cache has all of them.
std::vector<std::string> row_places(llama_context * ctx);

// Names of the devices of all layers, the output last.
std::vector<std::string> layer_devices(const llama_model * model);

}  // namespace library
