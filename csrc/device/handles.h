// Handles of ggml as owners.
#pragma once

#include "ggml-backend.h"

#include <memory>

template <auto free_function> struct freed_by {
    template <typename T> void operator()(T * handle) const { free_function(handle); }
};

using backend_handle = std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>>;
using event_handle   = std::unique_ptr<ggml_backend_event, freed_by<ggml_backend_event_free>>;
using buffer_handle  = std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>>;
